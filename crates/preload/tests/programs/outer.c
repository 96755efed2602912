/* A library that precedes another one and looks up the next function with the same name. */
#define _GNU_SOURCE
#include <dlfcn.h>

const char *name(void) { return "outer"; }

const char *outer(void) { return ((const char *(*)(void))dlsym(RTLD_NEXT, "name"))(); }
