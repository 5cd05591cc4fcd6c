/* The directory of a payload in memory: groups of elements, and their tables of symbols. */
#ifndef CKSTORE_DIRECTORY_H
#define CKSTORE_DIRECTORY_H

#include <stdint.h>

#include "../arrays.h"

enum {
    CLASSES = 64,      /* The number of classes, and so the maximal number of groups. */
    SYMBOLS = 4096,    /* The maximal number of symbols of a group. */
    TABLE = 4097,      /* The maximal number of bins of values and runs together. */
    LONGEST = 12,      /* The longest code in bits. */
    LONGEST_RUN = 44,  /* The maximal bits of a zero run: the sum of a place and a run does not overflow. */
    STREAMS = 4,
    PADDING = 8,       /* Bytes of zeros after the streams, for wide loads. */
    MEASURED = 4096,   /* Pairs of a sparse group from which its streams are quarters, whose elements are counted. */
};

/* Kinds of groups: a symbol for each element; one for each zero run and the value behind it; one value throughout. */
enum { DENSE, SPARSE, EQUAL };

struct group {
    int64_t label, start, count;   /* Class, first element, number of elements. */
    int64_t kind;
    int64_t constant;              /* The value of all elements. */
    int64_t plane;                 /* Bytes of each element that lie in a plane: 0, 1, 2 or 4. */
    int64_t pairs;                 /* Their number; before planning, that of the non-zeros. */
    int64_t top, run_top;          /* Bits of the numbers without their sign, and of the zero runs. */
    int64_t bins, run_bins;        /* The number of bins of both, 1 for the runs of a dense group. */
    int64_t single;                /* The only symbol that occurs, or -1. */
    int64_t bits, widest;          /* The encoder's plan: bits in the streams, maximal bits of an item, ... */
    int64_t first_pair;            /* ... its first pair, ... */
    int64_t exact, paired;         /* ... whether symbols are numbers, and whether pairs are extracted. */
    int64_t spans[STREAMS];        /* Elements of each quarter of a sparse group, if there are MEASURED pairs. */
};

/* Return whether the streams have a quarter of the items each, so that no place depends on another stream. */
static inline bool has_quarters(const struct group *group) { return group->kind == DENSE || group->pairs >= MEASURED; }

struct directory {
    struct group *groups;      /* CLASSES */
    int64_t (*lowers)[TABLE];  /* Smallest numbers of the bins of values, followed by those of runs. */
    uint8_t (*raws)[TABLE];    /* Raw bits of these bins. */
    uint8_t (*lengths)[SYMBOLS];
    int64_t *ends;             /* Bytes of streams 0 to 2. */
    void *reader;              /* Scratch of the decoder. */
};

#endif
