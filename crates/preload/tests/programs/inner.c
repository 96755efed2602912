const char *name(void) { return "inner"; }
