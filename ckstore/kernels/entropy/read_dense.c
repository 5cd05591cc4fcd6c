/* Decode the symbols of dense groups, one per element and table lookup, in the order of the elements. */
#include "tables.h"

/* Numbers of a stream that are taken before they are placed: they and the table stay in the first-level cache. */
enum { QUARTER = 128 };

/* Scratch: a table, and bits and entries of numbers; symbols; a table of pairs; tables of bytes. */
struct reader {
    uint64_t numbers[(1 << LONGEST) + 2 * STREAMS * QUARTER];
    uint64_t pairs[1 << LOOK];
    struct symbol symbols[SYMBOLS];
    struct glances glances;
};

/* Maximal bits of numbers that are loaded in pairs: twice that and 7 fit a word. */
enum { TWICE_LOADED = 28 };

/* Maximal bits, without the sign, of numbers above their planes, and of whole integers, that 32-bit entries serve. */
enum { SHORT_TOP = 19, SHORT_ALL = 31 };

#define WORD uint32_t
#define SIGNED int32_t
#define SUFFIXED(name) name##_short
#include "read_dense_of.h"

#define WORD uint64_t
#define SIGNED int64_t
#define SUFFIXED(name) name##_long
#include "read_dense_of.h"

/* Decode a group of numbers of at most 32 bits. DAMAGED if a stream ends too early. */
static int64_t read_dense(
    const uint8_t *payload, int64_t positions[STREAMS], int64_t limit, const struct group *group, const struct symbol *symbols,
    int64_t longest, struct reader *reader, const uint8_t *plane, uint8_t *coded, int64_t size) {
    if (group->top <= SHORT_TOP && group->top + 8 * group->plane <= SHORT_ALL)
        return read_dense_short(payload, positions, limit, group, symbols, longest, reader, plane, coded, size);
    return read_dense_long(payload, positions, limit, group, symbols, longest, reader, plane, coded, size);
}
