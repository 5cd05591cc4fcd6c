/* Kernels of the lattices: floats to integers and back, predictions, and differences of order-preserving ordinals. */
#include "arrays.h"
#include "entropy/words.h"

#define ELEMENT uint8_t
#define SUFFIXED(name) name##_1
#include "ordinals_of.h"
#define ELEMENT uint16_t
#define SUFFIXED(name) name##_2
#include "ordinals_of.h"
#define ELEMENT uint32_t
#define SUFFIXED(name) name##_4
#include "ordinals_of.h"
#define ELEMENT uint64_t
#define SUFFIXED(name) name##_8
#include "ordinals_of.h"

int64_t KERNEL(ordinal_difference)(array bits, array predicted, int64_t mirrored, array out) {
    struct view from = input(bits), known = input(predicted ? predicted : bits), to = output(out);
    if (from.count < 0 || !is_unsigned(&from) || !is_of(&known, from.type, from.count) ||
        !is_of(&to, from.type, from.count))
        return MISFIT;
    const void *before = predicted ? known.data : 0;
#define DIFFERENCE(size) difference_##size((const void *)from.data, before, (void *)to.data, from.count, mirrored)
    WITH_SIZE(from.size, DIFFERENCE)
#undef DIFFERENCE
    return 0;
}

int64_t KERNEL(ordinal_correct)(array predicted, array residuals, int64_t mirrored) {
    struct view to = output(residuals), known = input(predicted ? predicted : residuals);
    if (to.count < 0 || !is_unsigned(&to) || !is_of(&known, to.type, to.count))
        return MISFIT;
    const void *before = predicted ? known.data : 0;
#define CORRECT(size) correct_##size(before, (void *)to.data, to.count, mirrored)
    WITH_SIZE(to.size, CORRECT)
#undef CORRECT
    return 0;
}
