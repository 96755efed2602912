/* A library that is before another one and asks for the next function of its own name. */
#define _GNU_SOURCE
#include <dlfcn.h>

const char *name(void) { return "outer"; }

const char *outer(void) { return ((const char *(*)(void))dlsym(RTLD_NEXT, "name"))(); }
