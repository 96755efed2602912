/* A library that precedes another one and looks up the next function with the same name, and a function of the driver. */
#define _GNU_SOURCE
#include <dlfcn.h>

const char *name(void) { return "outer"; }

const char *outer(void) { return ((const char *(*)(void))dlsym(RTLD_NEXT, "name"))(); }

int has_driver(void) { return dlsym(RTLD_DEFAULT, "cuMemHostAlloc") != 0; }
