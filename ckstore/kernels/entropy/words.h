/* Unaligned little-endian words, and bits of words. */
#ifndef CKSTORE_WORDS_H
#define CKSTORE_WORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Payloads are little-endian; so must be the processor."
#endif

/* Before a loop of few instructions: Clang unrolls it by itself. */
#ifdef __clang__
#define UNROLLED
#else
#define UNROLLED _Pragma("GCC unroll 4")
#endif

#define INLINE static inline __attribute__((always_inline))

/* Integers at any address. */
typedef uint16_t __attribute__((aligned(1), may_alias)) unaligned_2;
typedef uint32_t __attribute__((aligned(1), may_alias)) unaligned_4;
typedef uint64_t __attribute__((aligned(1), may_alias)) unaligned_8;

INLINE uint64_t load_word(const uint8_t *bytes) { return *(const unaligned_8 *)bytes; }

INLINE void store_word(uint8_t *bytes, uint64_t word) { *(unaligned_8 *)bytes = word; }

/* Return the unsigned integer of 1, 2, 4 or 8 bytes. */
INLINE uint64_t load_bytes(const uint8_t *bytes, int64_t size) {
    return size == 1   ? *bytes
           : size == 2 ? *(const unaligned_2 *)bytes
           : size == 4 ? *(const unaligned_4 *)bytes
                       : load_word(bytes);
}

/* Write the low 1, 2, 4 or 8 bytes of a word. */
INLINE void store_bytes(uint8_t *bytes, int64_t size, uint64_t word) {
    if (size == 1)
        *bytes = (uint8_t)word;
    else if (size == 2)
        *(unaligned_2 *)bytes = (uint16_t)word;
    else if (size == 4)
        *(unaligned_4 *)bytes = (uint32_t)word;
    else
        store_word(bytes, word);
}

/* Return the number of significant bits, 0 for 0. */
INLINE int64_t bit_length(uint64_t word) { return word ? 64 - __builtin_clzll(word) : 0; }

/* Return the bits of a signed integer without its sign: 0 for 0 and -1, else the least k of -2^k to 2^k - 1. */
INLINE int64_t magnitude_bits(int64_t value) { return bit_length((uint64_t)(value ^ (value >> 63))); }

/* Return the low `bits` (0 to 63) bits. */
INLINE uint64_t low_bits(uint64_t word, int64_t bits) { return word & ((UINT64_C(1) << bits) - 1); }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Call a function whose last argument but one is a size of elements with that size as a constant. */
#define WITH_SIZE(size, call) \
    switch (size) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 4: call(4); break; \
    default: call(8); break; \
    }

#endif
