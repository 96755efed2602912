/* Gives each process the same process ID, as a child in another PID namespace may have its parent's. */
int getpid(void) { return 1; }
