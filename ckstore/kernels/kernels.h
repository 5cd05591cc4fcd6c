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

/* Types of entropy/directory.h and entropy/tables.h. */
struct directory;
struct symbol;

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

/* entropy/lengths.c */

/* For tests: write the canonical code of each symbol, of lengths uint8 (n), into codes uint32 (n): bit-reversed code | length << 16.
 * DAMAGED unless the lengths form a complete prefix code of at most 12 bits. */
int64_t KERNEL(canonical_codes)(array lengths, array codes);

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

/* Fill the 2^bits entries of a table, uint64, of the kind `tells` with `count` symbols; for tests. */
int64_t KERNEL(fill_table)(array table, int64_t bits, int64_t tells, const struct symbol *symbols, int64_t count);

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

#pragma GCC visibility pop

#endif
