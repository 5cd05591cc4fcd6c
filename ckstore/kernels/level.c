/* The level of processors to use, and variables that all levels share; compiled once, for the lowest. */
#include "entropy/logarithms.h"
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Return the register XCR0: the parts of registers that the system saves for a process. */
static unsigned saved_registers(void) {
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int has_all(unsigned flags, unsigned wanted) { return (flags & wanted) == wanted; }

static int64_t level(void) {
    unsigned a, b, c, d, ignored, extended, more;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !__get_cpuid_count(7, 0, &ignored, &extended, &ignored, &ignored) ||
        !__get_cpuid(0x80000001, &ignored, &ignored, &more, &ignored))
        return 0;
    /* FMA, MOVBE, POPCNT, OSXSAVE, F16C; AVX2, BMI1, BMI2; LZCNT. */
    if (!has_all(c, 1u << 12 | 1u << 22 | 1u << 23 | 1u << 27 | 1u << 29) ||
        !has_all(extended, 1u << 5 | 1u << 3 | 1u << 8) || !has_all(more, 1u << 5) || !has_all(saved_registers(), 0x06))
        return 0;
    /* AVX-512 F, DQ, CD, BW, VL. */
    int wide = has_all(extended, 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31);
    return wide && has_all(saved_registers(), 0xE6) ? 2 : 1;
}
#else
static int64_t level(void) { return 0; }
#endif

int64_t array_head;
double times_logs[TABULATED];

int64_t start_kernels(int64_t head) {
    array_head = head;
    for (int count = 1; count < TABULATED; count++)
        times_logs[count] = count * log_2(count);
    return level();
}
