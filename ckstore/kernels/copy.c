/* A copy to memory that this processor does not read soon: stores of whole lines bypass the caches, which would read the
 * lines first. */
#include <string.h>

#include "arrays.h"

#if defined __AVX512F__
#include <immintrin.h>
typedef __m512i part;
#define LOAD _mm512_loadu_si512
#define STORE(to, value) _mm512_stream_si512((void *)(to), value)
#elif defined __AVX2__
#include <immintrin.h>
typedef __m256i part;
#define LOAD _mm256_loadu_si256
#define STORE(to, value) _mm256_stream_si256((void *)(to), value)
#elif defined __SSE2__
#include <emmintrin.h>
typedef __m128i part;
#define LOAD _mm_loadu_si128
#define STORE(to, value) _mm_stream_si128((void *)(to), value)
#endif

enum { LINES = 256 };

int64_t KERNEL(copy_past_caches)(array bytes, array out) {
    struct view source = input(bytes), target = output(out);
    if (target.count < 0 || !is_of(&source, U1, target.count) || target.type != U1)
        return MISFIT;
    int64_t done = 0;
#ifdef STORE
    int64_t head = (int64_t)(-(uintptr_t)target.data % LINES);
    done = head < target.count ? head : target.count;
    memcpy(target.data, source.data, (size_t)done);
    for (; done + LINES <= target.count; done += LINES) {
        part parts[LINES / sizeof(part)];
        for (size_t i = 0; i < LINES / sizeof(part); i++)
            parts[i] = LOAD((const void *)(source.data + done + i * sizeof(part)));
        for (size_t i = 0; i < LINES / sizeof(part); i++)
            STORE(target.data + done + i * sizeof(part), parts[i]);
    }
    _mm_sfence();
#endif
    memcpy(target.data + done, source.data + done, (size_t)(target.count - done));
    return 0;
}
