/* The encoder's arrays, which Python makes: each has room for `capacity` elements unless a comment says otherwise. */
#ifndef CKSTORE_ENCODER_H
#define CKSTORE_ENCODER_H

#include "directory.h"

enum {
    CELLS = 1 << 16,          /* The maximal number of cells of a histogram. */
    PLANE_BYTES = 4,          /* The widest plane. */
    STREAM_BYTES = 16,        /* More than the bytes of an item: a code, a run and a value. */
    STREAM_SPARE = 1 << 16,   /* More than the items beyond a quarter of each group, and wide stores, take. */
    DIRECTORY_BYTES = 7 << 20 /* More than any directory takes. */
};

/* The sizes of a planned payload in bytes, and whether it has streams, and elements other than 0. */
struct facts {
    int64_t narrow;             /* Of the narrowest type that holds all elements. */
    int64_t differs, streamed;
    int64_t directory, planes;
    int64_t room;               /* Of one stream in `streams`. */
    int64_t size;               /* Of the payload. */
};

struct encoder {
    uint16_t *symbols;     /* Symbols of dense groups, at their elements' places. */
    uint16_t *joints;      /* Symbols of pairs; before, cells of their values ... */
    uint16_t *run_cells;   /* ... and of their runs. */
    int64_t *numbers;      /* Samples of groups that may have planes; then numbers whose symbols are not `exact`. */
    int64_t *runs, *values;  /* Pairs. */
    int64_t *cells;        /* CELLS. Scratch; while streams are written entries by number. */
    uint8_t *splits;       /* 2 CELLS, aligned to 2 bytes. Scratch. */
    double (*costs)[2];    /* CLASSES. Estimated bits, and entropy in bits. */
    uint8_t *planes;       /* PLANE_BYTES capacity. The planes of all groups. */
    uint8_t *streams;      /* STREAM_BYTES capacity + STREAM_SPARE. */
    uint8_t *directory;    /* DIRECTORY_BYTES. */
    int64_t capacity;
    struct facts facts;
};

#endif
