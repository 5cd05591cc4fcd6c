/* Logarithms by arithmetic alone: the same everywhere, unlike those of libraries. */
#ifndef CKSTORE_LOGARITHMS_H
#define CKSTORE_LOGARITHMS_H

#include <stdint.h>
#include <string.h>

enum { TABULATED = 4096 };

/* count * log2(count) of small counts; `start_kernels` fills it. */
extern double times_logs[TABULATED];

/* Return log2 of a number from 1 on. */
static inline double log_2(double number) {
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    /* number = 2^exponent * mantissa, where the mantissa lies between the roots of 1/2 and 2. */
    uint64_t exponent = (bits - UINT64_C(0x3FE6A09E667F3BCD)) >> 52;
    bits -= exponent << 52;
    double mantissa, sum = 0.0;
    memcpy(&mantissa, &bits, sizeof bits);
    double part = (mantissa - 1.0) / (mantissa + 1.0), square = part * part;
    for (int odd = 23; odd > 0; odd -= 2)
        sum = sum * square + 1.0 / odd;
    return (double)exponent + part * sum * 2.8853900817779268; /* 2 / ln 2 */
}

/* Return count * log2(count), 0 for 0. */
static inline double times_log(int64_t count) {
    return count < TABULATED ? times_logs[count] : (double)count * log_2((double)count);
}

#endif
