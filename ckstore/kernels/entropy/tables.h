/* Decoding tables: the meaning of the next bits of a stream.
 *
 * A table of 2^b entries is indexed by the next b bits, lowest first. An entry begins with the number of bits that it
 * takes. */
#ifndef CKSTORE_TABLES_H
#define CKSTORE_TABLES_H

#include "directory.h"
#include "words.h"

struct symbol {
    int64_t number, run;    /* The smallest number of its bin; that of a pair's zero run, whose raw bits come first. */
    int16_t code, length;   /* The bit-reversed code and its length, -1 for a symbol that does not occur. */
    int16_t raw, run_raw;   /* Raw bits of both. */
};

/* Kinds of entries. SYMBOL: bits of the code | symbol << 8. BY_CODE, also of 32 bits: bits of code and raw bits | bits
 * of the code << 8 | smallest number << 12. PAIR: bits of code and raw bits | run plus one, below 2^16, << 8 | value, of
 * 32 bits, << 32. */
enum { SYMBOL, BY_CODE, PAIR };

/* An entry whose bits do not determine the item, or whose item does not fit it. It takes no bits. */
enum { UNRESOLVED = 64 };

/* Index bits of tables of pairs, and of bytes: their entries fit the first-level cache. */
enum { LOOK = 12, GLANCE = 11 };

/* Tables of bytes: the elements of an entry, and how a stream goes on: bits taken, or UNRESOLVED | zeros to skip before
 * the bytes << 8 | elements << 16. */
struct glances {
    uint64_t bytes[1 << GLANCE];
    uint32_t moves[1 << GLANCE];
    int64_t furthest;  /* The maximal number of elements of an entry. */
    bool skips;
};

/* A stream of a group: its next bit, the next element, and the end of its elements. */
struct cursor {
    int64_t position, at, end;
};

/* Return the bits of a symbol's code and of all raw bits. */
INLINE int64_t total_bits(const struct symbol *symbol) { return symbol->length + symbol->run_raw + symbol->raw; }

/* Return whether `bits` bits hold all of a pair, its value has at most 31 bits, and its run is below 2^16 - 1. */
INLINE bool resolves(const struct symbol *symbol, int64_t bits) {
    return total_bits(symbol) <= bits && symbol->number == (int32_t)symbol->number && symbol->run >= 0 &&
           symbol->run + (1 << symbol->run_raw) <= (1 << 16) - 1;
}

#endif
