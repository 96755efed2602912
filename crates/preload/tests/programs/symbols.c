/* Looks names up in all ways, if there is no CUDA driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

extern const char *outer(void);

int main(void) {
    void *self = dlopen(NULL, RTLD_NOW);
    printf("default %d, self %d, ", dlsym(RTLD_DEFAULT, "cuMemHostAlloc") != NULL, dlsym(self, "cuMemFreeHost") != NULL);
    printf("text %d, ", dlerror() != NULL);
    printf("next %d\n", dlsym(RTLD_NEXT, "cuMemHostAlloc") != NULL);
    printf("%s %s\n", outer(), ((const char *(*)(void))dlsym(RTLD_DEFAULT, "name"))());
    printf("puts %d, none %d\n", dlsym(RTLD_DEFAULT, "puts") != NULL, dlsym(self, "no_such_name") != NULL);
    void *plugin = dlopen("libplugin.so", RTLD_NOW);
    printf("driver %d, ", ((int (*)(void))dlsym(plugin, "has_driver"))());
    dlclose(plugin);
    printf("unloaded %d\n", dlopen("libplugin.so", RTLD_NOW | RTLD_NOLOAD) == NULL);
    return 0;
}
