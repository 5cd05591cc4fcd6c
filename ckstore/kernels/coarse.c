/* Kernels of coarse objects: lattice values, rounded ordinals, deviations, and sums over rows and columns.
 *
 * Decoding works on bits and does no arithmetic on subnormal numbers, so that every process decodes the same values. */
#include "grid.h"

/* Return the largest exponent that an element's step may have, for `rows` exponents of rows. */
static int64_t largest_exponent(const struct grid *grid, int64_t rows) {
    int64_t largest = grid->step, down = INT16_MIN, across = INT16_MIN;
    for (int64_t i = 0; grid->rows && i < rows; i++)
        down = most(down, grid->rows[i]);
    for (int64_t i = 0; grid->cols && i < grid->width; i++)
        across = most(across, grid->cols[i]);
    return largest + (grid->rows ? down : 0) + (grid->cols ? across : 0);
}

INLINE void values_of(
    const int32_t *restrict integers, int64_t count, struct grid grid, bool overflows, uint8_t *restrict out, int size) {
    for (int64_t k = 0; k < count;) {
        int64_t part = least(count - k, grid.width - grid.col), exponent = row_exponent(&grid);
        uint8_t *to = out + size * k;
        if (grid.cols)
            for (int64_t i = 0; i < part; i++)
                put_float(to, size, i, (double)integers[k + i] * power_of_two(exponent + grid.cols[grid.col + i]));
        else {
            double power = power_of_two(exponent);
            for (int64_t i = 0; i < part; i++)
                put_float(to, size, i, (double)integers[k + i] * power);
        }
        advance(&grid, part);
        k += part;
    }
    double largest = size == 4 ? FLT_MAX : DBL_MAX;
    for (int64_t i = 0; overflows && i < count; i++)
        put_float(out, size, i, clamped(float_at(out, size, i), largest));
}

int64_t KERNEL(linear_values)(
    array integers, int64_t step, array rows, array cols, int64_t width, int64_t start, array out) {
    struct view from = input(integers), to = output(out), down = input(rows);
    struct grid grid;
    if (!is_float(&to) || !is_of(&from, I4, to.count) || !make_grid(&grid, step, rows, cols, width, start, to.count))
        return MISFIT;
    double largest = to.size == 4 ? FLT_MAX : DBL_MAX;
    bool overflows = power_of_two(largest_exponent(&grid, down.count)) * MAX_INTEGER > largest;
#define VALUES(size) values_of((const int32_t *)from.data, from.count, grid, overflows, to.data, size)
    WITH_FLOAT(to.size, VALUES);
    return 0;
}

/* Return the order-preserving integer of float bits: negative for negative numbers, 0 for both zeros. */
INLINE int64_t order_of(uint64_t bits, uint64_t sign) {
    int64_t magnitude = (int64_t)(bits & (sign - 1));
    return bits & sign ? -magnitude : magnitude;
}

INLINE int32_t rounded(int64_t integer) { return (int32_t)least(most(integer, -MAX_INTEGER), MAX_INTEGER); }

INLINE void rounded_integers(
    const uint8_t *restrict bits, int64_t count, int64_t shift, int64_t unit, struct grid grid, int32_t *restrict out,
    int size) {
    uint64_t sign = UINT64_C(1) << (8 * size - 1);
    int64_t up = (INT64_C(5) << shift) >> 3;
    for (int64_t k = 0; k < count;) {
        int64_t part = least(count - k, grid.width - grid.col), model = row_exponent(&grid);
        const uint8_t *from = bits + size * k;
        if (grid.cols)
            for (int64_t i = 0; i < part; i++) {
                int64_t away = up - (model + grid.cols[grid.col + i]) * unit;
                out[k + i] = rounded((order_of(load_bytes(from + size * i, size), sign) + away) >> shift);
            }
        else {
            int64_t away = up - model * unit;
            for (int64_t i = 0; i < part; i++)
                out[k + i] = rounded((order_of(load_bytes(from + size * i, size), sign) + away) >> shift);
        }
        advance(&grid, part);
        k += part;
    }
}

/* Levels, units and shifts whose models fit 62 bits. */
static bool is_model(int64_t shift, int64_t unit, int64_t level) {
    return shift >= 0 && shift < 32 && unit >= 0 && unit <= 1 << 30 && level >= -(1 << 30) && level <= 1 << 30;
}

int64_t KERNEL(rounded_quantise)(
    array bits, int64_t shift, int64_t unit, int64_t level, array rows, array cols, int64_t width, int64_t start,
    array out) {
    struct view from = input(bits), to = output(out);
    struct grid grid;
    if ((from.type != U2 && from.type != U4) || !is_of(&to, I4, from.count) || !is_model(shift, unit, level) ||
        !make_grid(&grid, level, rows, cols, width, start, from.count))
        return MISFIT;
    if (from.size == 2)
        rounded_integers(from.data, from.count, shift, unit, grid, (int32_t *)to.data, 2);
    else
        rounded_integers(from.data, from.count, shift, unit, grid, (int32_t *)to.data, 4);
    return 0;
}

/* Return the float bits of an order-preserving integer, at most `largest` in magnitude; +0 within `reach` of 0. */
INLINE uint64_t bits_of_order(int64_t order, int64_t reach, int64_t largest, int sign) {
    int64_t magnitude = order < 0 ? -order : order;
    uint64_t bits = (uint64_t)least(magnitude, largest) | (uint64_t)(order < 0) << sign;
    return magnitude > reach ? bits : 0;
}

/* Row by row and without branches, so that the compiler vectorises the loop. */
INLINE void rounded_bits(
    const int32_t *restrict integers, int64_t count, int64_t shift, int64_t unit, struct grid grid, int64_t largest,
    uint8_t *restrict out, int size) {
    int64_t reach = (INT64_C(5) << shift) >> 3, scale = INT64_C(1) << shift;
    for (int64_t k = 0; k < count;) {
        int64_t part = least(count - k, grid.width - grid.col), model = row_exponent(&grid) * unit;
        uint8_t *to = out + size * k;
        if (grid.cols)
            for (int64_t i = 0; i < part; i++) {
                int64_t order = integers[k + i] * scale + (model + grid.cols[grid.col + i] * unit);
                store_bytes(to + size * i, size, bits_of_order(order, reach, largest, 8 * size - 1));
            }
        else
            for (int64_t i = 0; i < part; i++)
                store_bytes(
                    to + size * i, size,
                    bits_of_order(integers[k + i] * scale + model, reach, largest, 8 * size - 1));
        advance(&grid, part);
        k += part;
    }
}

int64_t KERNEL(rounded_values)(
    array integers, int64_t shift, int64_t unit, int64_t level, array rows, array cols, int64_t width, int64_t start,
    int64_t largest, array out) {
    struct view from = input(integers), to = output(out);
    struct grid grid;
    if ((to.type != U2 && to.type != U4) || !is_of(&from, I4, to.count) || !is_model(shift, unit, level) ||
        !make_grid(&grid, level, rows, cols, width, start, to.count))
        return MISFIT;
    const int32_t *source = (const int32_t *)from.data;
    if (to.size == 2)
        rounded_bits(source, from.count, shift, unit, grid, largest, to.data, 2);
    else
        rounded_bits(source, from.count, shift, unit, grid, largest, to.data, 4);
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
    for (int64_t i = 0; i < from.count; i++, advance(&grid, 1)) {
        double scaled = float_at(from.data, from.size, i) * power_of_two(-exponent_here(&grid));
        ((int32_t *)to.data)[i] =
            (int32_t)clamped(floor(scaled + threshold_of((uint64_t)(start + i))), MAX_INTEGER);
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
