/* Kernels that convert between float32 and floats of 16 bits: integer arithmetic, the same on every processor. */
#include "arrays.h"
#include "entropy/words.h"

INLINE uint16_t to_bfloat16(uint32_t bits) {
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((rounded & 0x7F80) == 0x7F80 ? (rounded & 0x8000) | 0x7F7F : rounded);
}

INLINE uint16_t to_float16(uint32_t bits) {
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF, exponent = magnitude >> 23, rounded = 0;
    if (exponent >= 113) {
        rounded = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
        rounded = rounded < 0x7BFF ? rounded : 0x7BFF;
    } else if (exponent >= 102) {
        /* A subnormal float16: integer multiples of 2^-24. */
        uint32_t shift = 126 - exponent, mantissa = (magnitude & 0x7FFFFF) | 0x800000;
        rounded = (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    }
    return (uint16_t)(sign | rounded);
}

INLINE uint32_t from_bfloat16(uint16_t bits) { return (uint32_t)bits << 16; }

INLINE uint32_t from_float16(uint16_t half) {
    uint32_t field = half >> 10 & 31, mantissa = half & 0x3FF;
    if (field == 31)
        field = 255;
    else if (field)
        field += 112;
    else if (mantissa) {
        uint32_t zeros = (uint32_t)__builtin_clz(mantissa) - 21;
        mantissa <<= zeros;
        field = 113 - zeros;
    }
    return (uint32_t)(half & 0x8000) << 16 | field << 23 | (mantissa & 0x3FF) << 13;
}

#define CONVERSION(name, FROM, TO, from_type, to_type) \
    int64_t KERNEL(name)(array bits, array out) { \
        struct view source = input(bits), target = output(out); \
        if (!is_of(&source, from_type, target.count) || !is_of(&target, to_type, source.count)) \
            return MISFIT; \
        const FROM *restrict from = (const FROM *)source.data; \
        TO *restrict to = (TO *)target.data; \
        for (int64_t i = 0; i < source.count; i++) \
            to[i] = name(from[i]); \
        return 0; \
    }

CONVERSION(to_bfloat16, uint32_t, uint16_t, U4, U2)
CONVERSION(to_float16, uint32_t, uint16_t, U4, U2)
CONVERSION(from_bfloat16, uint16_t, uint32_t, U2, U4)
CONVERSION(from_float16, uint16_t, uint32_t, U2, U4)
