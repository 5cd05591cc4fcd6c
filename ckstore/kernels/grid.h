/* Exponents by row and column: the step of element k is two to the power step + rows[(start + k) / width] +
 * cols[(start + k) % width]; an axis without exponents is an empty array. */
#ifndef CKSTORE_GRID_H
#define CKSTORE_GRID_H

#include <float.h>
#include <math.h>

#include "arrays.h"
#include "entropy/words.h"

struct grid {
    const int16_t *rows, *cols;  /* Null without exponents. */
    int64_t step, width, row, col;
};

/* Sums of floats have this many parts, each of every 256th element: the compiler vectorises them. */
enum { LANES = 256 };

/* Largest magnitude of an integer. */
enum { MAX_INTEGER = 1 << 24 };

/* Fill a grid for `count` elements; return whether it has exponents for all of them. */
static inline bool make_grid(
    struct grid *grid, int64_t step, array rows, array cols, int64_t width, int64_t start, int64_t count) {
    struct view down = input(rows), across = input(cols);
    if (down.type != I2 || across.type != I2 || down.count < 0 || across.count < 0 || count < 0 || start < 0 ||
        step != (int32_t)step)
        return false;
    if (!down.count && !across.count) {
        *grid = (struct grid){.step = step, .width = most(count, 1)};
        return true;
    }
    if (width < 1 || start > INT64_MAX - count)
        return false;
    if ((down.count && count && (start + count - 1) / width >= down.count) || (across.count && across.count != width))
        return false;
    *grid = (struct grid){
        .rows = down.count ? (const int16_t *)down.data : 0,
        .cols = across.count ? (const int16_t *)across.data : 0,
        .step = step,
        .width = width,
        .row = start / width,
        .col = start % width,
    };
    return true;
}

/* Return the exponent of the present row. */
INLINE int64_t row_exponent(const struct grid *grid) { return grid->step + (grid->rows ? grid->rows[grid->row] : 0); }

/* Go to the next row, or by `count` elements within a row. */
INLINE void advance(struct grid *grid, int64_t count) {
    grid->col += count;
    if (grid->col == grid->width) {
        grid->col = 0;
        grid->row++;
    }
}

/* Return two to the power of an integer from -1022 to 1023. */
INLINE double power_of_two(int64_t exponent) {
    uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* Element i of floats of 4 or 8 bytes. */
INLINE double float_at(const uint8_t *floats, int size, int64_t i) {
    return size == 4 ? (double)((const float *)floats)[i] : ((const double *)floats)[i];
}

INLINE void put_float(uint8_t *floats, int size, int64_t i, double value) {
    if (size == 4)
        ((float *)floats)[i] = (float)value;
    else
        ((double *)floats)[i] = value;
}

INLINE bool is_float(const struct view *view) { return view->count >= 0 && view->type >= F4; }

/* Call with the size of floats as a constant. */
#define WITH_FLOAT(size, call) \
    do { \
        if ((size) == 4) \
            call(4); \
        else \
            call(8); \
    } while (0)

/* Return a number that the compiler does not know: GCC makes branches of comparisons with two constants. */
INLINE double unknown(double number) {
    __asm__("" : "+m"(number));
    return number;
}

/* Return a number at most `largest`, which is `unknown`, in magnitude: two instructions. */
INLINE double clamped(double value, double largest) {
    value = value > largest ? largest : value;
    return value < -largest ? -largest : value;
}

INLINE double sum_of(const double *parts) {
    double sum = 0.0;
    for (int i = 0; i < LANES; i++)
        sum += parts[i];
    return sum;
}

INLINE double largest_of(const double *parts) {
    double largest = 0.0;
    for (int i = 0; i < LANES; i++)
        largest = parts[i] > largest ? parts[i] : largest;
    return largest;
}

#endif
