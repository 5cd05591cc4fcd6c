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

/* Types of entropy/directory.h, tables.h, encoder.h and bins.c. */
struct directory;
struct symbol;
struct encoder;
struct geometry;

#pragma GCC visibility push(default)

/* level.c, without a suffix */

/* Set `array_head`. Return the processor's level: 0 for the baseline, 1 for AVX2, 2 for AVX-512. */
int64_t start_kernels(int64_t head);

/* lattice.c */

/* Write ord(bits) - ord(predicted) modulo the width, or ord(bits) if `predicted` is null. If `mirrored`, both change
 * their sign where the predicted one is negative. All arrays have one unsigned type and size. */
int64_t KERNEL(ordinal_difference)(array bits, array predicted, int64_t mirrored, array out);

/* Invert `ordinal_difference` in place. */
int64_t KERNEL(ordinal_correct)(array predicted, array residuals, int64_t mirrored);

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

/* entropy/survey.c, plan.c and write.c: the steps of an encoder, in this order, on the first `number` groups of a directory,
 * whose label, start and count are set. `coded` has the elements in coded order, of any signed type. */

/* Fill `pairs` (the non-zeros), `top`, `kind`, `paired`, and `constant` of groups of equal elements. A dense group may
 * still turn out sparse. Evenly spaced blocks of groups that may have planes become `numbers`, at the group's first
 * element. Return the bits of the largest element without its sign. */
int64_t KERNEL(survey_groups)(array coded, struct directory *directory, int64_t number, struct encoder *encoder);

/* Fill `plane`, `exact`, and `top` of the bits above a plane. Return the bytes of all planes. */
int64_t KERNEL(choose_planes)(struct directory *directory, int64_t number, struct encoder *encoder);

/* Split the elements of dense groups: planes one after the other into uint8 planes, the other bits into `symbols`, counted
 * from the smallest number on, if the group is `exact`; else into `numbers`. */
int64_t KERNEL(take_numbers)(
    array coded, const struct directory *directory, int64_t number, struct encoder *encoder, array planes);

/* Choose bins and code lengths of dense groups. Return the number of `paired` groups: groups that have pairs anyway, and
 * groups that pairs might make smaller. The next two steps are for these. */
int64_t KERNEL(plan_dense)(struct directory *directory, int64_t number, struct encoder *encoder);

/* Write the zero run before every non-zero, and its value, of the `paired` groups; fill `first_pair`. */
int64_t KERNEL(extract_pairs)(array coded, struct directory *directory, int64_t number, struct encoder *encoder);

/* Choose bins and code lengths of `paired` groups; a dense group becomes sparse if that is smaller. */
int64_t KERNEL(plan_pairs)(struct directory *directory, int64_t number, struct encoder *encoder);

/* Return the bytes that one stream, or the directory, may need. */
int64_t KERNEL(stream_room)(const struct directory *directory, int64_t number);
int64_t KERNEL(directory_room)(const struct directory *directory, int64_t number);

/* Write the groups that have symbols, stream j into uint8 buffer (4 room) from byte j * room on; fill `ends`. */
int64_t KERNEL(write_streams)(
    const struct directory *directory, int64_t number, struct encoder *encoder, array buffer, int64_t room);

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

#pragma GCC visibility pop

#endif
