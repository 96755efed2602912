/** Initial values of a pp_get_options. */
#define PP_GET_OPTIONS_INIT {sizeof(pp_get_options), 1, PP_DEFAULT_WAIT, NULL}

/** The compiler warns if the result is ignored: after a failure the pointer is NULL, or the buffer was not returned. */
#if defined(__GNUC__)
#define PP_NODISCARD __attribute__((warn_unused_result))
#else
#define PP_NODISCARD
#endif
