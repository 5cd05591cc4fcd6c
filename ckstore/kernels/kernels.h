/* The kernels that Python calls.
 *
 * Every source is compiled once for each level of processors, with LEVEL as the suffix of the exported names. All levels
 * return the same bytes.
 *
 * An `array` is an object of NumPy: C-contiguous, aligned, in native byte order, of any shape. A kernel checks the types
 * and sizes of its arrays, which a comment names as "int16 (n)", and returns MISFIT for others. Payloads may be damaged:
 * a kernel checks every number that comes from one and returns DAMAGED; its output then holds anything. It reads and
 * writes only the given arrays. Otherwise it returns 0, or the result that its comment names. */
#ifndef CKSTORE_KERNELS_H
#define CKSTORE_KERNELS_H

#include <stdint.h>

#define JOINED(name, level) name##_##level
#define LEVELLED(name, level) JOINED(name, level)
#define KERNEL(name) LEVELLED(name, LEVEL)

enum { DAMAGED = 1, MISFIT = -2 };

typedef const void *array;

/* Bytes of the head of an object of Python, before the fields of arrays. */
extern int64_t array_head;

/* Types of entropy/directory.h, directory.c, tables.h, encoder.h and bins.c. */
struct directory;
struct symbol;
struct encoder;
struct geometry;
struct bits;

#pragma GCC visibility push(default)

/* level.c, without a suffix */

/* Set `array_head`. Return the processor's level: 0 for the baseline, 1 for AVX2, 2 for AVX-512. */
int64_t start_kernels(int64_t head);

/* lattice.c: an element's step is two to the power step + rows[(start + k) / width] + cols[(start + k) % width]; rows and
 * cols are int16, or empty. Values are float32 or float64 (n), integers int32 (n). */

/* Fill found, float64 (2), with the sum of squares and the largest magnitude of finite values. Return their number. */
int64_t KERNEL(statistics)(array values, array found);

/* Write the integers nearest to values; 0 for values that are not finite. If `doubled`, write those on half the step,
 * halved and rounded away from 0. */
int64_t KERNEL(linear_quantise)(
    array values, int64_t step, array rows, array cols, int64_t width, int64_t start, int64_t doubled, array out);

/* Move the integers of a base, in place, to a lattice whose exponents are larger by `shift` and those of rows and cols.
 */
int64_t KERNEL(linear_project)(array integers, int64_t shift, array rows, array cols, int64_t width, int64_t start);

/* Write ord(bits) - ord(predicted) modulo the width, or ord(bits) if `predicted` is null. If `mirrored`, both change
 * their sign where the predicted one is negative. All arrays have one unsigned type and size. */
int64_t KERNEL(ordinal_difference)(array bits, array predicted, int64_t mirrored, array out);

/* Invert `ordinal_difference` in place. */
int64_t KERNEL(ordinal_correct)(array predicted, array residuals, int64_t mirrored);

/* Write uint8 classes (n) of unsigned bits (n): top less the magnitude's bits from `shift` on, from 0 to `limit`. */
int64_t KERNEL(magnitude_classes)(array bits, int64_t shift, int64_t top, int64_t limit, array classes);

/* Return the largest (bits without sign) >> shift below `ceiling`, 0 if there is none. */
int64_t KERNEL(magnitude_top)(array bits, int64_t shift, int64_t ceiling);

/* coarse.c, with the same steps */

/* Write the values of integers, at most the largest finite number. */
int64_t KERNEL(linear_values)(
    array integers, int64_t step, array rows, array cols, int64_t width, int64_t start, array out);

/* Write the integers of uint16 or uint32 bits: (ord(x) - unit * (level + rows[i] + cols[j])) / 2^shift, 3/8 and more up. */
int64_t KERNEL(rounded_quantise)(
    array bits, int64_t shift, int64_t unit, int64_t level, array rows, array cols, int64_t width, int64_t start,
    array out);

/* Write the bits of the ordinals in the middle of the integers' cells, at most `largest` in magnitude. */
int64_t KERNEL(rounded_values)(
    array integers, int64_t shift, int64_t unit, int64_t level, array rows, array cols, int64_t width, int64_t start,
    int64_t largest, array out);

/* Fill found, float64 (3), with the largest difference, the sum of squared differences and that of squares of values that
 * are finite in both arrays. Return their number. */
int64_t KERNEL(deviation)(array values, array others, array found);

/* Add ordinals of magnitudes of unsigned bits, from 1 to `ceiling` and less `shift` low bits, to int64 rows and cols, and
 * their numbers to int64 counts, rows first. */
int64_t KERNEL(order_sums)(
    array bits, int64_t width, int64_t ceiling, int64_t shift, array rows, array cols, array counts);

/* Add finite values, or their squares, in rows of `width`, to float64 rows and cols. */
int64_t KERNEL(value_sums)(array values, int64_t squared, int64_t width, array rows, array cols);

/* Fill found, float64 (1), with the sum of squared differences of finite values, in units of the elements' steps. */
int64_t KERNEL(weighted_squares)(
    array values, array others, int64_t step, array rows, array cols, int64_t width, int64_t start, array found);

/* Write the integers of finite values, rounded up or down by a threshold per element. */
int64_t KERNEL(linear_dithered)(
    array values, int64_t step, array rows, array cols, int64_t width, int64_t start, array out);

/* Fill found, float64 (1), with the mean cosine of the distances of values from lattice values. */
int64_t KERNEL(concentration)(
    array values, int64_t step, array rows, array cols, int64_t width, int64_t start, array found);

/* short_floats.c: round uint32 bits (n) of finite float32 to uint16 bits (n), ties to even, at most the largest finite
 * number; and convert the latter to the former. */
int64_t KERNEL(to_bfloat16)(array bits, array out);
int64_t KERNEL(to_float16)(array bits, array out);
int64_t KERNEL(from_bfloat16)(array bits, array out);
int64_t KERNEL(from_float16)(array bits, array out);

/* codebook.c: words are those of float32, uint32 (n) */

/* Write the number of float64 midpoints, at most 256 that end with infinity, below each value, into uint8 out (n). */
int64_t KERNEL(nearest)(array words, array midpoints, int64_t zero, array out);

/* Write base + centroids[indices] of uint8 indices (n); centroids are float32. */
int64_t KERNEL(add)(array base, array indices, array centroids, array out);

/* Write base + 2^step * product of the words of elements from `start` on, whole rows of `width`, rounded once. Int32
 * numbers are a weight for each of `rank` directions, rows of `rank` numbers, and `rank` rows of `width` numbers; an
 * element of the product is the sum over directions of weight, number of its row and number of its column. DAMAGED if sums
 * could leave 32 bits. */
int64_t KERNEL(add_products)(
    array base, array numbers, int64_t rank, int64_t width, int64_t step, int64_t start, array out);

/* Write value - base. */
int64_t KERNEL(difference)(array words, array base, array out);

/* Add normal values to int64 counts and float64 sums (at least 2^(32 - shift)) of their words without `shift` bits. */
int64_t KERNEL(bucket_statistics)(array words, array counts, array sums, int64_t shift);

/* Count finite values by the bins of the magnitudes of their ranks, uint32 (n), in int64 counts (16384). */
int64_t KERNEL(rank_counts)(array words, array ranks, array counts);

/* Count values that are neither pruned nor protected by their bins, in int64 counts (32768). Elements with bins of
 * magnitude and sensitivity below the first two numbers are pruned, from the others on protected. */
int64_t KERNEL(level_counts)(
    array words, array sensitivities, int64_t pruned, int64_t insensitive, int64_t large, int64_t sensitive,
    array counts);

/* Overwrite uint8 indices of pruned elements with `zero`, and of protected elements with `aside`. */
int64_t KERNEL(split_indices)(
    array words, array sensitivities, int64_t pruned, int64_t insensitive, int64_t large, int64_t sensitive,
    int64_t zero, int64_t aside, array out);

/* patches.c: elements of 1, 2, 4 or 8 bytes are passed as uint8 (size n) */

/* List the elements that differ: their numbers in int32 places (n), their differences in uint64 numbers (n), as sign and
 * magnitude less one. Return their number. */
int64_t KERNEL(find_changes)(
    array after, array before, int64_t size, int64_t is_float, array places, array numbers);

/* Write a patch of `count` changes into a uint8 payload (at least 19 count + 96); return the next byte. */
int64_t KERNEL(write_patch)(array places, array numbers, int64_t count, array payload);

/* Apply a patch to its elements in place; DAMAGED if it does not fit them. */
int64_t KERNEL(apply_patch)(array payload, array bits, int64_t size, int64_t is_float, int64_t is_undone);

/* entropy/directory.c */

/* Read a directory from bytes `begin` to `end` of a uint8 payload of `count` elements; without classes (`grouped`) there is
 * one group. Return the number of groups, -1 for an impossible directory. */
int64_t KERNEL(read_directory)(
    array payload, int64_t begin, int64_t end, int64_t grouped, int64_t count, struct directory *directory);

/* Write a directory of `number` groups into a uint8 buffer. Return its bytes, -1 if there is no room. */
int64_t KERNEL(write_directory)(
    array buffer, int64_t grouped, int64_t count, int64_t number, struct directory *directory);

/* entropy/read.c */

/* Decode the first `number` groups of a directory into integers of any signed type, in coded order.
 *
 * payload    uint8; eight bytes follow the last stream
 * planes     the first byte of the planes; 0 without streams
 * directory  its groups and their tables; `ends` has the bytes of streams 0 to 2 */
int64_t KERNEL(read_streams)(array payload, int64_t planes, const struct directory *directory, int64_t number, array coded);

/* Return the bytes of the scratch of `read_streams`. */
int64_t KERNEL(reader_bytes)(void);

/* Convert signed integers (n) to a type (n) that is at least as wide. */
int64_t KERNEL(widen)(array narrow, array wide);

/* Add signed integers (n) of at most 32 bits to int32 sums (n), which are shifted right first, rounding half up. */
int64_t KERNEL(accumulate)(array narrow, array sums, int64_t shift);

/* entropy/encode.c */

/* Plan a payload of elements in coded order, of any signed type, and write its directory, planes and streams into the
 * encoder; fill `facts`. Label, start and count of the first `number` groups are set. Return the bytes of the payload. */
int64_t KERNEL(plan_payload)(
    array coded, int64_t grouped, int64_t number, struct directory *directory, struct encoder *encoder);

/* Write the planned payload of these elements into uint8 payload, with 0 for its checksum. */
int64_t KERNEL(write_payload)(
    array coded, int64_t grouped, int64_t classes_check, const struct directory *directory,
    const struct encoder *encoder, array payload);

/* Convert signed integers (n) to a type (n) that is at most as wide. */
int64_t KERNEL(narrow)(array wide, array narrowed);

/* entropy/histogram.c */

/* Estimate the bits of a payload's signed elements (n), and of its tables.
 *
 * classes  uint8 (n), below 64; or null
 * fine     every octave of each sign has 2^fine cells
 * counts   int32, scratch: 65 histograms (without classes one) of 2^fine cells for each bit of an element and each sign
 * bits     float64 (2, 2): bits of elements and of tables, in natural order and, if there are classes, in groups */
int64_t KERNEL(estimate_bits)(array values, array classes, int64_t fine, array counts, array bits);

/* entropy/order.c */

/* Begin the table of groups, one for each class that occurs in uint8 classes: fill label, start and count, and in cursors,
 * int64 (4, 256), the place in coded order of each quarter's first element of a class. Return the number of groups, or -1
 * for a class above 63. */
int64_t KERNEL(group_classes)(array classes, array cursors, struct directory *directory);

/* Write values (n) into coded (n), of one type, sorted stably by their uint8 classes (n), with the cursors of
 * `group_classes`, which move. */
int64_t KERNEL(to_coded_order)(array values, array classes, array cursors, array coded);

/* Undo `to_coded_order`, with the first `number` groups of a directory. DAMAGED if their counts are not the classes'. */
int64_t KERNEL(to_natural_order)(
    array coded, array classes, const struct directory *directory, int64_t number, array values);

/* For tests alone, which give addresses of enough memory. */

/* Write the canonical code of each symbol, of lengths uint8 (n), into codes uint32 (n): bit-reversed code | length << 16.
 * DAMAGED unless the lengths form a complete prefix code of at most 12 bits. */
int64_t KERNEL(canonical_codes)(array lengths, array codes);

/* Write the code lengths, uint8 (n), of int64 counts (n). Return the only symbol that occurs or -1; `bits` is the sum of
 * count times length. */
int64_t KERNEL(code_lengths)(array counts, array lengths, int64_t *bits);

/* Fill the 2^bits entries of a table, uint64, of the kind `tells` with `count` symbols. */
int64_t KERNEL(fill_table)(array table, int64_t bits, int64_t tells, const struct symbol *symbols, int64_t count);

/* entropy/directory.c describes these. */
int64_t KERNEL(code_bits)(struct bits *bits, int64_t count, int64_t value);
int64_t KERNEL(code_number)(struct bits *bits, int64_t value);
int64_t KERNEL(code_bins)(struct bits *bits, int64_t *top, int64_t bins, int64_t room, int64_t *lowers, uint8_t *raws);

/* entropy/bins.c describes these; `prices` are those of a symbol and of a cut. */
int64_t KERNEL(set_geometry)(int64_t top, int64_t exact, int64_t fine, struct geometry *geometry);
int64_t KERNEL(cell_of)(int64_t number, const struct geometry *geometry);
int64_t KERNEL(choose_bins)(
    const int64_t *cells, const struct geometry *geometry, int64_t top, int64_t deepest, const double prices[2],
    uint8_t *splits, int64_t floors[2], double losses[8], double *bits);
int64_t KERNEL(list_bins)(
    const int64_t *cells, const struct geometry *geometry, int64_t top, int64_t deepest, int64_t all_occur,
    const uint8_t *splits, const int64_t floors[2], int64_t *lowers, uint8_t *raws, int64_t *counts, int64_t limit);
int64_t KERNEL(symbols_of_cells)(
    const struct geometry *geometry, const int64_t *lowers, const uint8_t *raws, int64_t bins, uint16_t *table);

/* tree.c: values of nodes are uint32 (n, 8), and have 8 words each. */

/* Write the values of chunks of 1,024 bytes, uint8 (n * 1024), the first of which has the number `first`. */
int64_t KERNEL(chunk_values)(array bytes, int64_t first, array values);

/* Write the values of the nodes above pairs of children (2n, 8). */
int64_t KERNEL(parent_values)(array children, array values);

/* Write the roots of the largest aligned trees above leaves from number `first` on to the nodes, u4 (n, 8), and the
 * logarithms of their leaves to the levels, u1 (n), n at least 128; overwrite the leaves' values. Return their number. */
int64_t KERNEL(largest_trees)(array values, int64_t first, array nodes, array levels);

/* Write the digest of bytes: uint8, the last chunk, and the values of the trees before it. */
int64_t KERNEL(root_value)(array bytes, int64_t chunk, array above, array value);

/* copy.c: copy bytes, uint8 (n), to memory that this processor does not read soon, uint8 (n). */
int64_t KERNEL(copy_past_caches)(array bytes, array out);

#pragma GCC visibility pop

#endif
