/* Ordinals of floats of one width; included for each ELEMENT, with SUFFIXED(name) for the names. */

/* Return the order-preserving integer of float bits, modulo the width; this inverts itself.
 *
 * Negative floats come below positive ones, -0.0 below +0.0. */
INLINE ELEMENT SUFFIXED(folded)(ELEMENT value) {
    const ELEMENT sign = (ELEMENT)((ELEMENT)1 << (8 * sizeof(ELEMENT) - 1)), others = (ELEMENT)(sign - 1);
    return value & sign ? value ^ others : value;
}

static void SUFFIXED(difference)(
    const ELEMENT *restrict bits, const ELEMENT *restrict predicted, ELEMENT *restrict out, int64_t count,
    bool is_mirrored) {
    const ELEMENT mirrored = is_mirrored ? (ELEMENT)((ELEMENT)1 << (8 * sizeof(ELEMENT) - 1)) : 0;
    if (!predicted) {
        UNROLLED
        for (int64_t i = 0; i < count; i++)
            out[i] = SUFFIXED(folded)(bits[i]);
        return;
    }
    UNROLLED
    for (int64_t i = 0; i < count; i++) {
        ELEMENT turned = predicted[i] & mirrored;
        ELEMENT before = SUFFIXED(folded)(predicted[i] ^ turned);
        out[i] = (ELEMENT)(SUFFIXED(folded)(bits[i] ^ turned) - before);
    }
}

static void SUFFIXED(correct)(
    const ELEMENT *restrict predicted, ELEMENT *restrict residuals, int64_t count, bool is_mirrored) {
    const ELEMENT mirrored = is_mirrored ? (ELEMENT)((ELEMENT)1 << (8 * sizeof(ELEMENT) - 1)) : 0;
    if (!predicted) {
        UNROLLED
        for (int64_t i = 0; i < count; i++)
            residuals[i] = SUFFIXED(folded)(residuals[i]);
        return;
    }
    UNROLLED
    for (int64_t i = 0; i < count; i++) {
        ELEMENT turned = predicted[i] & mirrored;
        ELEMENT before = SUFFIXED(folded)(predicted[i] ^ turned);
        residuals[i] = SUFFIXED(folded)((ELEMENT)(before + residuals[i])) ^ turned;
    }
}

#undef ELEMENT
#undef SUFFIXED
