/* The encoder's arrays, which Python makes: each has room for `capacity` elements unless a comment says otherwise. */
#ifndef CKSTORE_ENCODER_H
#define CKSTORE_ENCODER_H

#include "directory.h"

/* The maximal number of cells of a histogram. */
enum { CELLS = 1 << 16 };

struct encoder {
    uint16_t *symbols;     /* Symbols of dense groups, at their elements' places. */
    uint16_t *joints;      /* Symbols of pairs; before, cells of their values ... */
    uint16_t *run_cells;   /* ... and of their runs. */
    int64_t *numbers;      /* Samples of groups that may have planes; then numbers whose symbols are not `exact`. */
    int64_t *runs, *values;  /* Pairs. */
    int64_t *cells;        /* CELLS. Scratch; in `write_streams` entries by number. */
    uint8_t *splits;       /* 2 CELLS, aligned to 2 bytes. Scratch. */
    double (*costs)[2];    /* CLASSES. Estimated bits, and entropy in bits. */
    int64_t capacity;
};

#endif
