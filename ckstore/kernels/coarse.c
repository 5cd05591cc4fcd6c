/* Kernels of coarse objects: lattice values, rounded ordinals, deviations, and sums over rows and columns.
 *
 * Decoding works on bits and does no arithmetic on subnormal numbers, so that every process decodes the same values. */
#include "grid.h"

/* The smallest and the largest exponent that an element's step may have. */
struct range {
    int64_t low, high;
};

/* Add the range of `count` exponents, if there are any. */
static void widen_range(struct range *range, const int16_t *exponents, int64_t count) {
    int16_t low = INT16_MAX, high = INT16_MIN;
    for (int64_t i = 0; exponents && i < count; i++) {
        low = exponents[i] < low ? exponents[i] : low;
        high = exponents[i] > high ? exponents[i] : high;
    }
    range->low += exponents ? low : 0;
    range->high += exponents ? high : 0;
}

/* Return the range of a grid with `rows` exponents of rows. */
static struct range range_of(const struct grid *grid, int64_t rows) {
    struct range range = {grid->step, grid->step};
    widen_range(&range, grid->rows, rows);
    widen_range(&range, grid->cols, grid->width);
    return range;
}

/* Return two to the power of an integer from -126 to 127. */
INLINE float single_power(int32_t exponent) {
    uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* Write values whose steps are normal numbers of float32: then so are the values, and products are exact. */
static void single_values(const int32_t *restrict integers, int64_t count, struct grid grid, float *restrict out) {
    for (int64_t k = 0; k < count;) {
        int64_t part = least(count - k, grid.width - grid.col);
        int32_t exponent = (int32_t)row_exponent(&grid);
        if (grid.cols)
            for (int64_t i = 0; i < part; i++)
                out[k + i] = (float)integers[k + i] * single_power(exponent + grid.cols[grid.col + i]);
        else {
            float power = single_power(exponent);
            UNROLLED
            for (int64_t i = 0; i < part; i++)
                out[k + i] = (float)integers[k + i] * power;
        }
        advance(&grid, part);
        k += part;
    }
}

INLINE void double_values(
    const int32_t *restrict integers, int64_t count, struct grid grid, uint8_t *restrict out, int size) {
    for (int64_t k = 0; k < count;) {
        int64_t part = least(count - k, grid.width - grid.col), exponent = row_exponent(&grid);
        uint8_t *to = out + size * k;
        if (grid.cols)
            for (int64_t i = 0; i < part; i++)
                put_float(to, size, i, (double)integers[k + i] * power_of_two(exponent + grid.cols[grid.col + i]));
        else {
            double power = power_of_two(exponent);
            UNROLLED
            for (int64_t i = 0; i < part; i++)
                put_float(to, size, i, (double)integers[k + i] * power);
        }
        advance(&grid, part);
        k += part;
    }
}

INLINE void clamp(uint8_t *floats, int64_t count, int size) {
    const double largest = unknown(size == 4 ? FLT_MAX : DBL_MAX);
    for (int64_t i = 0; i < count; i++)
        put_float(floats, size, i, clamped(float_at(floats, size, i), largest));
}

int64_t KERNEL(linear_values)(
    array integers, int64_t step, array rows, array cols, int64_t width, int64_t start, array out) {
    struct view from = input(integers), to = output(out), down = input(rows);
    struct grid grid;
    if (!is_float(&to) || !is_of(&from, I4, to.count) || !make_grid(&grid, step, rows, cols, width, start, to.count))
        return MISFIT;
    struct range range = range_of(&grid, down.count);
    const int32_t *source = (const int32_t *)from.data;
    if (to.size == 4 && range.low >= FLT_MIN_EXP - 1 && range.high < FLT_MAX_EXP)
        single_values(source, from.count, grid, (float *)to.data);
    else {
#define VALUES(size) double_values(source, from.count, grid, to.data, size)
        WITH_FLOAT(to.size, VALUES);
#undef VALUES
    }
#define CLAMP(size) clamp(to.data, to.count, size)
    if (power_of_two(range.high) * MAX_INTEGER > (to.size == 4 ? FLT_MAX : DBL_MAX))
        WITH_FLOAT(to.size, CLAMP);
    return 0;
}

#define INTEGER int32_t
#define WORD uint32_t
#define SUFFIXED(name) short_##name
#include "rounded_of.h"
#define INTEGER int64_t
#define WORD uint64_t
#define SUFFIXED(name) long_##name
#include "rounded_of.h"

/* Levels, units and shifts whose models fit 62 bits. */
static bool is_model(int64_t shift, int64_t unit, int64_t level) {
    return shift >= 0 && shift < 32 && unit >= 0 && unit <= 1 << 30 && level >= -(1 << 30) && level <= 1 << 30;
}

/* Call with a width, and the size of elements, 2 or 4, as a constant. */
#define WITH_WIDTH(size, width, call) \
    do { \
        if ((size) == 2) \
            call(width, 2); \
        else \
            call(width, 4); \
    } while (0)

/* Return whether all numbers of a range, and their negatives, have 32 bits. */
static bool is_short(int64_t low, int64_t high) { return low > INT32_MIN && high <= INT32_MAX; }

/* Return the range of the order-preserving integers of float bits: negative for negative numbers. */
INLINE struct range orders_of(const uint8_t *bits, int64_t count, int size) {
    const uint32_t sign = UINT32_C(1) << (8 * size - 1);
    int32_t low = 0, high = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t value = (uint32_t)load_bytes(bits + size * i, size);
        int32_t magnitude = (int32_t)(value & (sign - 1)), order = value & sign ? -magnitude : magnitude;
        low = order < low ? order : low;
        high = order > high ? order : high;
    }
    return (struct range){low, high};
}

int64_t KERNEL(rounded_quantise)(
    array bits, int64_t shift, int64_t unit, int64_t level, array rows, array cols, int64_t width, int64_t start,
    array out) {
    struct view from = input(bits), to = output(out), down = input(rows);
    struct grid grid;
    if ((from.type != U2 && from.type != U4) || !is_of(&to, I4, from.count) || !is_model(shift, unit, level) ||
        !make_grid(&grid, level, rows, cols, width, start, from.count))
        return MISFIT;
    struct range levels = range_of(&grid, down.count);
    struct range orders = from.size == 2 ? orders_of(from.data, from.count, 2) : orders_of(from.data, from.count, 4);
    int64_t low = orders.low - levels.high * unit, high = orders.high - levels.low * unit + (INT64_C(1) << shift);
#define ROUND(width, size) width##_rounded_integers(from.data, from.count, shift, unit, grid, (int32_t *)to.data, size)
    if (is_short(low, high))
        WITH_WIDTH(from.size, short, ROUND);
    else
        WITH_WIDTH(from.size, long, ROUND);
#undef ROUND
    return 0;
}

int64_t KERNEL(rounded_values)(
    array integers, int64_t shift, int64_t unit, int64_t level, array rows, array cols, int64_t width, int64_t start,
    int64_t largest, array out) {
    struct view from = input(integers), to = output(out), down = input(rows);
    struct grid grid;
    if ((to.type != U2 && to.type != U4) || !is_of(&from, I4, to.count) || !is_model(shift, unit, level) ||
        largest < 0 || !make_grid(&grid, level, rows, cols, width, start, to.count))
        return MISFIT;
    const int32_t *source = (const int32_t *)from.data;
    struct range levels = range_of(&grid, down.count);
    int32_t least_integer = 0, most_integer = 0;
    for (int64_t i = 0; i < from.count; i++) {
        least_integer = source[i] < least_integer ? source[i] : least_integer;
        most_integer = source[i] > most_integer ? source[i] : most_integer;
    }
    int64_t scale = INT64_C(1) << shift, low = least_integer * scale + levels.low * unit;
    int64_t high = most_integer * scale + levels.high * unit;
#define UNROUND(width, size) width##_rounded_bits(source, from.count, shift, unit, grid, largest, to.data, size)
    if (is_short(low, most(high, largest)))
        WITH_WIDTH(to.size, short, UNROUND);
    else
        WITH_WIDTH(to.size, long, UNROUND);
    return 0;
}

INLINE int64_t deviation_of(const uint8_t *values, const uint8_t *others, int64_t count, double found[3], int size) {
    double largest[LANES] = {0}, squares[LANES] = {0}, totals[LANES] = {0};
    int64_t finite = 0;
    for (int64_t first = 0; first < count; first += LANES)
        for (int64_t i = 0; i < least(count - first, LANES); i++) {
            double value = float_at(values, size, first + i);
            double difference = fabs(value - float_at(others, size, first + i));
            bool counts = difference <= DBL_MAX;
            difference = counts ? difference : 0.0;
            value = counts ? value : 0.0;
            largest[i] = difference > largest[i] ? difference : largest[i];
            squares[i] += difference * difference;
            totals[i] += value * value;
            finite += counts;
        }
    found[0] = largest_of(largest);
    found[1] = sum_of(squares);
    found[2] = sum_of(totals);
    return finite;
}

int64_t KERNEL(deviation)(array values, array others, array found) {
    struct view from = input(values), against = input(others), to = output(found);
    if (!is_float(&from) || !is_of(&against, from.type, from.count) || !is_of(&to, F8, 3))
        return MISFIT;
    double *results = (double *)to.data;
    return from.size == 4 ? deviation_of(from.data, against.data, from.count, results, 4)
                          : deviation_of(from.data, against.data, from.count, results, 8);
}

INLINE void order_sums_of(
    const uint8_t *bits, int64_t count, int64_t width, int64_t ceiling, int64_t shift, int64_t *restrict rows,
    int64_t height, int64_t *restrict cols, int64_t *restrict counts, int size) {
    uint64_t mask = (UINT64_C(1) << (8 * size - 1)) - 1;
    int64_t *across = counts + height;
    for (int64_t row = 0; row < height; row++) {
        int64_t total = 0, known = 0, first = least(row * width, count);
        for (int64_t i = 0; i < least(width, count - first); i++) {
            int64_t magnitude = (int64_t)(load_bytes(bits + size * (first + i), size) & mask);
            int64_t one = (magnitude > 0) & (magnitude <= ceiling), value = (magnitude >> shift) * one;
            total += value;
            known += one;
            cols[i] += value;
            across[i] += one;
        }
        rows[row] += total;
        counts[row] += known;
    }
}

int64_t KERNEL(order_sums)(
    array bits, int64_t width, int64_t ceiling, int64_t shift, array rows, array cols, array counts) {
    struct view from = input(bits), down = output(rows), across = output(cols), numbers = output(counts);
    if (from.count < 0 || !is_unsigned(&from) || width < 1 || shift < 0 || shift > 62 || down.count < 0 ||
        !is_of(&down, I8, down.count) || !is_of(&across, I8, width) || !is_of(&numbers, I8, down.count + width) ||
        down.count > from.count / width + 1)
        return MISFIT;
    int64_t *by_row = (int64_t *)down.data, *by_col = (int64_t *)across.data, *by_both = (int64_t *)numbers.data;
#define SUM(size) \
    order_sums_of(from.data, from.count, width, ceiling, shift, by_row, down.count, by_col, by_both, size)
    WITH_SIZE(from.size, SUM)
    return 0;
}

INLINE void value_sums_of(
    const uint8_t *values, int64_t count, bool squared, int64_t width, double *restrict rows, double *restrict cols,
    int size) {
    for (int64_t k = 0, row = 0; k < count; k += width, row++) {
        double total = 0.0;
        for (int64_t i = 0; i < least(width, count - k); i++) {
            double value = float_at(values, size, k + i);
            value = squared ? value * value : value;
            value = fabs(value) <= DBL_MAX ? value : 0.0;
            total += value;
            cols[i] += value;
        }
        rows[row] += total;
    }
}

int64_t KERNEL(value_sums)(array values, int64_t squared, int64_t width, array rows, array cols) {
    struct view from = input(values), down = output(rows), across = output(cols);
    if (!is_float(&from) || width < 1 || !is_of(&across, F8, width) || down.type != F8 ||
        down.count < (from.count + width - 1) / width)
        return MISFIT;
    double *by_row = (double *)down.data, *by_col = (double *)across.data;
#define VALUE_SUMS(size) value_sums_of(from.data, from.count, squared, width, by_row, by_col, size)
    WITH_FLOAT(from.size, VALUE_SUMS);
    return 0;
}

INLINE double square_of(double difference, int64_t exponent) {
    difference *= power_of_two(exponent);
    return fabs(difference) <= 1e150 ? difference * difference : 0.0;
}

INLINE double weighted_of(const uint8_t *values, const uint8_t *others, int64_t count, struct grid grid, int size) {
    double sums[LANES] = {0};
    for (int64_t k = 0; k < count;) {
        int64_t part = least(least(count - k, grid.width - grid.col), LANES), exponent = -row_exponent(&grid);
        const uint8_t *here = values + size * k, *there = others + size * k;
        for (int64_t i = 0; i < part; i++) {
            double difference = float_at(here, size, i) - float_at(there, size, i);
            sums[i] += square_of(difference, exponent - (grid.cols ? grid.cols[grid.col + i] : 0));
        }
        advance(&grid, part);
        k += part;
    }
    return sum_of(sums);
}

int64_t KERNEL(weighted_squares)(
    array values, array others, int64_t step, array rows, array cols, int64_t width, int64_t start, array found) {
    struct view from = input(values), against = input(others), to = output(found);
    struct grid grid;
    if (!is_float(&from) || !is_of(&against, from.type, from.count) || !is_of(&to, F8, 1) ||
        !make_grid(&grid, step, rows, cols, width, start, from.count))
        return MISFIT;
#define WEIGHTED(size) *(double *)to.data = weighted_of(from.data, against.data, from.count, grid, size)
    WITH_FLOAT(from.size, WEIGHTED);
    return 0;
}

/* Return a threshold in [0, 1) of an element. */
INLINE double threshold_of(uint64_t position) {
    uint64_t bits = (position + 1) * UINT64_C(0x9E3779B97F4A7C15);
    bits = (bits ^ (bits >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    bits = (bits ^ (bits >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (double)((bits ^ (bits >> 31)) >> 11) * 0x1p-53;
}

/* Return the exponent of the present element's step. */
INLINE int64_t exponent_here(const struct grid *grid) {
    return row_exponent(grid) + (grid->cols ? grid->cols[grid->col] : 0);
}

int64_t KERNEL(linear_dithered)(
    array values, int64_t step, array rows, array cols, int64_t width, int64_t start, array out) {
    struct view from = input(values), to = output(out);
    struct grid grid;
    if (!is_float(&from) || !is_of(&to, I4, from.count) || !make_grid(&grid, step, rows, cols, width, start, from.count))
        return MISFIT;
    const double largest = unknown(MAX_INTEGER);
    for (int64_t i = 0; i < from.count; i++, advance(&grid, 1)) {
        double scaled = float_at(from.data, from.size, i) * power_of_two(-exponent_here(&grid));
        ((int32_t *)to.data)[i] = (int32_t)clamped(floor(scaled + threshold_of((uint64_t)(start + i))), largest);
    }
    return 0;
}

int64_t KERNEL(concentration)(
    array values, int64_t step, array rows, array cols, int64_t width, int64_t start, array found) {
    struct view from = input(values), to = output(found);
    struct grid grid;
    if (!is_float(&from) || !is_of(&to, F8, 1) || !make_grid(&grid, step, rows, cols, width, start, from.count))
        return MISFIT;
    double total = 0.0;
    int64_t count = 0;
    for (int64_t i = 0; i < from.count; i++, advance(&grid, 1)) {
        double scaled = float_at(from.data, from.size, i) * power_of_two(-exponent_here(&grid));
        double rest = scaled - rint(scaled);
        if (rest != 0.0) {
            total += cos(6.283185307179586 * rest);
            count++;
        }
    }
    *(double *)to.data = count ? total / (double)count : 0.0;
    return 0;
}
