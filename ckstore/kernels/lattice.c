/* Kernels of the lattices: floats to integers and back, predictions, and differences of order-preserving ordinals. */
#include "grid.h"

#define ELEMENT uint8_t
#define SUFFIXED(name) name##_1
#include "ordinals_of.h"
#define ELEMENT uint16_t
#define SUFFIXED(name) name##_2
#include "ordinals_of.h"
#define ELEMENT uint32_t
#define SUFFIXED(name) name##_4
#include "ordinals_of.h"
#define ELEMENT uint64_t
#define SUFFIXED(name) name##_8
#include "ordinals_of.h"

int64_t KERNEL(ordinal_difference)(array bits, array predicted, int64_t mirrored, array out) {
    struct view from = input(bits), known = input(predicted ? predicted : bits), to = output(out);
    if (from.count < 0 || !is_unsigned(&from) || !is_of(&known, from.type, from.count) ||
        !is_of(&to, from.type, from.count))
        return MISFIT;
    const void *before = predicted ? known.data : 0;
#define DIFFERENCE(size) difference_##size((const void *)from.data, before, (void *)to.data, from.count, mirrored)
    WITH_SIZE(from.size, DIFFERENCE)
#undef DIFFERENCE
    return 0;
}

int64_t KERNEL(ordinal_correct)(array predicted, array residuals, int64_t mirrored) {
    struct view to = output(residuals), known = input(predicted ? predicted : residuals);
    if (to.count < 0 || !is_unsigned(&to) || !is_of(&known, to.type, to.count))
        return MISFIT;
    const void *before = predicted ? known.data : 0;
#define CORRECT(size) correct_##size(before, (void *)to.data, to.count, mirrored)
    WITH_SIZE(to.size, CORRECT)
#undef CORRECT
    return 0;
}

/* Classes and top of magnitudes of one width, in words that hold them. */
#define MAGNITUDES(ELEMENT, WORD, size) \
    static void classes_##size( \
        const ELEMENT *restrict bits, int64_t count, int64_t shift, int64_t top, int64_t limit, \
        uint8_t *restrict classes) { \
        const WORD mask = (ELEMENT)-1 >> 1, first = (WORD)top, last = (WORD)limit; \
        for (int64_t i = 0; i < count; i++) { \
            WORD level = (bits[i] & mask) >> shift, distance = level < first ? first - level : 0; \
            classes[i] = (uint8_t)(distance < last ? distance : last); \
        } \
    } \
    static int64_t top_##size(const ELEMENT *bits, int64_t count, int64_t shift, int64_t ceiling) { \
        const WORD mask = (ELEMENT)-1 >> 1, bound = (WORD)ceiling; \
        WORD top = 0; \
        for (int64_t i = 0; i < count; i++) { \
            WORD level = (bits[i] & mask) >> shift; \
            level &= -(WORD)(level < bound); /* Without a branch, so that the compiler vectorises the loop. */ \
            top = level > top ? level : top; \
        } \
        return (int64_t)top; \
    }

MAGNITUDES(uint8_t, uint32_t, 1)
MAGNITUDES(uint16_t, uint32_t, 2)
MAGNITUDES(uint32_t, uint32_t, 4)
MAGNITUDES(uint64_t, uint64_t, 8)

int64_t KERNEL(magnitude_classes)(array bits, int64_t shift, int64_t top, int64_t limit, array classes) {
    struct view from = input(bits), to = output(classes);
    if (from.count < 0 || !is_unsigned(&from) || !is_of(&to, U1, from.count) || shift < 0 || shift >= 8 * from.size ||
        top < 0 || limit < 0 || limit > 255)
        return MISFIT;
#define CLASSES_OF(size) classes_##size((const void *)from.data, from.count, shift, top, limit, to.data)
    WITH_SIZE(from.size, CLASSES_OF)
    return 0;
}

int64_t KERNEL(magnitude_top)(array bits, int64_t shift, int64_t ceiling) {
    struct view from = input(bits);
    int64_t top = 0;
    if (from.count < 0 || !is_unsigned(&from) || shift < 0 || shift >= 8 * from.size)
        return MISFIT;
#define TOP_OF(size) top = top_##size((const void *)from.data, from.count, shift, ceiling)
    WITH_SIZE(from.size, TOP_OF)
    return top;
}

INLINE int64_t statistics_of(const uint8_t *values, int64_t count, double found[2], int size) {
    double squares[LANES] = {0}, largest[LANES] = {0};
    int64_t finite = 0;
    for (int64_t first = 0; first < count; first += LANES)
        for (int64_t i = 0; i < least(count - first, LANES); i++) {
            double magnitude = fabs(float_at(values, size, first + i));
            bool counts = magnitude <= DBL_MAX;
            magnitude = counts ? magnitude : 0.0;
            squares[i] += magnitude * magnitude;
            largest[i] = magnitude > largest[i] ? magnitude : largest[i];
            finite += counts;
        }
    found[0] = sum_of(squares);
    found[1] = largest_of(largest);
    return finite;
}

int64_t KERNEL(statistics)(array values, array found) {
    struct view from = input(values), to = output(found);
    if (!is_float(&from) || !is_of(&to, F8, 2))
        return MISFIT;
    double *results = (double *)to.data;
    return from.size == 4 ? statistics_of(from.data, from.count, results, 4)
                          : statistics_of(from.data, from.count, results, 8);
}

/* Return the integer nearest to a number, ties to even; 0 if that is not finite. */
INLINE int32_t nearest(double scaled, double largest) {
    /* Of a number below 2^51, the sum keeps no bits of less than 1: its low bits are those of the integer. */
    double sum = clamped(scaled, largest) + 0x1.8p52;
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return fabs(scaled) <= DBL_MAX ? (int32_t)bits : 0;
}

INLINE void quantise(const uint8_t *restrict values, int64_t count, struct grid grid, int32_t *restrict out, int size) {
    const double largest = unknown(MAX_INTEGER);
    for (int64_t k = 0; k < count;) {
        int64_t part = least(count - k, grid.width - grid.col), exponent = -row_exponent(&grid);
        const uint8_t *from = values + size * k;
        if (grid.cols)
            for (int64_t i = 0; i < part; i++)
                out[k + i] = nearest(float_at(from, size, i) * power_of_two(exponent - grid.cols[grid.col + i]), largest);
        else {
            double inverse = power_of_two(exponent);
            for (int64_t i = 0; i < part; i++)
                out[k + i] = nearest(float_at(from, size, i) * inverse, largest);
        }
        advance(&grid, part);
        k += part;
    }
}

int64_t KERNEL(linear_quantise)(
    array values, int64_t step, array rows, array cols, int64_t width, int64_t start, int64_t doubled, array out) {
    struct view from = input(values), to = output(out);
    struct grid grid;
    if (!is_float(&from) || !is_of(&to, I4, from.count) ||
        !make_grid(&grid, step - (doubled != 0), rows, cols, width, start, from.count))
        return MISFIT;
    int32_t *restrict integers = (int32_t *)to.data;
#define QUANTISE(size) quantise(from.data, from.count, grid, integers, size)
    WITH_FLOAT(from.size, QUANTISE);
    for (int64_t i = 0; doubled && i < from.count; i++)
        integers[i] = (integers[i] + (integers[i] > 0)) >> 1;
    return 0;
}

/* Rows with an exponent beyond this have the same integers, whatever those of the columns. */
enum { FARTHEST = 1 << 20 };

/* Return value / 2^bits, rounded half up; clamped to a lattice's range if it grows. In 32 bits without branches, which
 * AVX2 shifts by a number for each element. */
INLINE int32_t shifted(int32_t value, int32_t bits) {
    int32_t near = bits < -24 ? -24 : bits > 31 ? 31 : bits, left = near < 0 ? -near : 0, right = near > 0 ? near : 0;
    int32_t bound = near < 0 ? MAX_INTEGER >> left : INT32_MAX, kept = value > bound ? bound : value;
    kept = kept < -bound ? -bound : kept;
    return (int32_t)(((uint32_t)kept << left) + (UINT32_C(1) << right >> 1)) >> right;
}

int64_t KERNEL(linear_project)(array integers, int64_t shift, array rows, array cols, int64_t width, int64_t start) {
    struct view to = output(integers);
    struct grid grid;
    if (!is_of(&to, I4, to.count) || !make_grid(&grid, shift, rows, cols, width, start, to.count))
        return MISFIT;
    int32_t *restrict target = (int32_t *)to.data;
    for (int64_t k = 0; k < to.count;) {
        int64_t end = k + least(to.count - k, grid.width - grid.col), bits = row_exponent(&grid);
        int32_t own = (int32_t)least(most(bits, -FARTHEST), FARTHEST);
        if (grid.cols) {
            const int16_t *restrict cols = grid.cols + grid.col;
            for (int64_t i = 0; i < end - k; i++)
                target[k + i] = shifted(target[k + i], own + cols[i]);
        } else if (bits >= 0) {
            /* By far the most common case, vectorised in 32 bits. No integer of a lattice has more. */
            int64_t right = least(bits, 30);
            uint32_t half = (UINT32_C(1) << right) >> 1;
            for (int64_t i = k; i < end; i++)
                target[i] = (int32_t)((uint32_t)target[i] + half) >> right;
        } else
            for (int64_t i = k; i < end; i++)
                target[i] = shifted(target[i], own);
        advance(&grid, end - k);
        k = end;
    }
    return 0;
}
