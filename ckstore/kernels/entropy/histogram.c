/* The size of a payload, estimated from histograms of its elements: one of all, and one of each class. */
#include "directory.h"
#include "logarithms.h"
#include "words.h"

/* The histograms of a call: of all elements, and of each class. */
enum { ROWS = 65 };

/* Measured bits of a group in the directory, and of each cell; about half of them become bins. */
static const double GROUP_BITS = 64.0, CELL_BITS = 3.5;

/* Bits by which a bin makes a sample's entropy too small: half a nat. */
static const double LOST = 0.72;

/* Add the bits of one group's elements, and those of its table, to `bits`. */
static void add_row(const int32_t *row, int64_t octaves, int64_t fine, double bits[2]) {
    int64_t total = 0, used = 0;
    double growing = 0.0;
    for (int64_t octave = 0; octave < octaves; octave++) {
        int64_t raw = most(octave - 1 - fine, 0);
        for (int sign = 0; sign < 2; sign++) {
            const int32_t *cells = row + ((sign * octaves + octave) << fine);
            for (int64_t cell = 0; cell < INT64_C(1) << fine; cell++) {
                int64_t count = cells[cell];
                if (!count)
                    continue;
                used++;
                total += count;
                growing += (double)(count * raw) - times_log(count);
            }
        }
    }
    if (total) {
        bits[0] += growing + times_log(total) + LOST * (double)(used - 1);
        bits[1] += GROUP_BITS + CELL_BITS * (double)used;
    }
}

/* Estimates of elements of one width. */
#define ESTIMATE(ELEMENT, name) \
    static void facts_##name(const ELEMENT *values, int64_t count, int64_t *octaves, bool *equal) { \
        ELEMENT all = 0, different = 0; \
        for (int64_t i = 0; i < count; i++) { \
            all |= (ELEMENT)(values[i] ^ (values[i] >> (8 * sizeof(ELEMENT) - 1))); \
            different |= (ELEMENT)(values[i] ^ values[0]); \
        } \
        *octaves = bit_length((uint64_t)(int64_t)all) + 1; \
        *equal = different == 0; \
    } \
    static void count_##name( \
        const ELEMENT *values, const uint8_t *classes, int64_t count, int64_t groups, int64_t octaves, int64_t fine, \
        int32_t *counts) { \
        int64_t cells = (2 * octaves) << fine; \
        uint64_t mask = (UINT64_C(1) << fine) - 1; \
        for (int64_t i = 0; i < count; i++) { \
            int64_t value = values[i], sign = value >> 63; \
            uint64_t magnitude = (uint64_t)(value ^ sign); \
            int64_t octave = bit_length(magnitude), shift = most(octave - 1 - fine, 0); \
            int64_t place = ((octave - sign * octaves) << fine) + (int64_t)(magnitude >> shift & mask); \
            if (groups) \
                place += cells * (least(classes[i], groups - 1) + 1); \
            counts[place]++; \
        } \
    }

ESTIMATE(int8_t, 1)
ESTIMATE(int16_t, 2)
ESTIMATE(int32_t, 4)
ESTIMATE(int64_t, 8)

int64_t KERNEL(estimate_bits)(array values, array classes, int64_t fine, array counts, array bits) {
    struct view from = input(values), by = input(classes ? classes : values), cells = output(counts), to = output(bits);
    if (from.count < 0 || !is_signed(&from) || (classes && !is_of(&by, U1, from.count)) || cells.type != I4 ||
        !is_of(&to, F8, 4) || fine < 0 || fine > 12 ||
        cells.count < (INT64_C(16) * from.size << fine) * (classes ? ROWS : 1))
        return MISFIT;
    double(*found)[2] = (double(*)[2])to.data;
    int64_t octaves, count = from.count, groups = 0;
    int32_t *rows = (int32_t *)cells.data;
    bool equal;
#define FACTS(size) facts_##size((const void *)from.data, count, &octaves, &equal)
    WITH_SIZE(from.size, FACTS)
    for (int order = 0; order < 2; order++) {
        found[order][0] = 0.0;
        found[order][1] = equal ? GROUP_BITS : 0.0;
    }
    if (equal)
        return 0;
    for (int64_t i = 0; classes && i < count; i++)
        groups = most(groups, by.data[i] + 1);
    groups = least(groups, ROWS - 1);
    int64_t size = (2 * octaves) << fine;
    memset(rows, 0, (size_t)((groups + 1) * size) * sizeof *rows);
#define COUNT(size) count_##size((const void *)from.data, by.data, count, groups, octaves, fine, rows)
    WITH_SIZE(from.size, COUNT)
    for (int64_t group = 1; group <= groups; group++)
        for (int64_t cell = 0; cell < size; cell++)
            rows[cell] += rows[group * size + cell];
    for (int64_t group = 0; group <= groups; group++)
        add_row(rows + group * size, octaves, fine, found[group ? 1 : 0]);
    return 0;
}
