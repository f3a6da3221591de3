/* What programs that test the library have in common. */
#include "../include/hoistway.h"

#include <stdio.h>
#include <stdlib.h>

/* Ends the program unless the condition holds. */
#define CHECK(condition)                                                                                      \
    do {                                                                                                      \
        if (!(condition)) {                                                                                   \
            fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition,                  \
                    hoistway_last_error());                                                                   \
            exit(1);                                                                                          \
        }                                                                                                     \
    } while (0)
