// Processors with AVX-512 and its bfloat16 dot products (Zen 4, Sapphire Rapids and later).
#include <immintrin.h>
#include <sched.h>
#include <string.h>

#include "fly.h"

namespace {

using namespace fly;

#include "avx512.h"

inline void st(uint16_t* p, Vec x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }

// Products of two inputs at a time with 16 outputs, of which ``two`` gives the weights.
template <int M, int P, int BYTES, class Ask, class Two>
ALWAYS_INLINE void by_twos(const uint16_t* a, long lda, const char* w, long panel, int steps, Ask ahead, float* out,
                           Two two) {
    Vec acc[M][2 * P];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < 2 * P; j++) acc[m][j] = zero();
    for (int k = 0; k < steps; k++) {
        ahead.template ask<P, BYTES>(w, panel, k);
        __m512bh b[2 * P];
        UNROLL for (int j = 0; j < 2 * P; j++) b[j] = two(j, k);
        UNROLL for (int m = 0; m < M; m++) {
            int32_t both;
            memcpy(&both, a + m * lda + 2 * k, 4);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(both);
            UNROLL for (int j = 0; j < 2 * P; j++) acc[m][j] = _mm512_dpbf16_ps(acc[m][j], x, b[j]);
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < 2 * P; j++) st(out + m * 32 * P + j * 16, acc[m][j]);
}

struct BFloat16 {
    typedef uint16_t Act, In;
    typedef float Sum;
    static constexpr int STEP = 2;
    static constexpr Room MOST = ROOM;
    template <int M, int P, class Ask>
    static NOINLINE void micro(const Act* a, long lda, const char* w, long panel, int steps, Ask ahead, float* out) {
        by_twos<M, P, 128>(a, lda, w, panel, steps, ahead, out, [=](int j, int k) {
            return (__m512bh)_mm512_loadu_si512(w + (j / 2) * panel + k * 128L + (j % 2) * 64);
        });
    }
};

// Whole numbers up to 127 are bfloat16 as they are, so int8 takes part in the same products once widened.
struct Int8 {
    typedef uint16_t Act, In;
    typedef float Sum;
    static constexpr int STEP = 2;
    static constexpr Room MOST = ROOM;
    static inline __m512bh widened(const char* w) {
        const Vec low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)w)));
        const Vec high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(w + 16))));
        const __m512i below = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
        const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
        return (__m512bh)_mm512_ternarylogic_epi32(_mm512_castps_si512(high), upper, below, 0xea);  // a & b | c
    }
    template <int M, int P, class Ask>
    static NOINLINE void micro(const Act* a, long lda, const char* w, long panel, int steps, Ask ahead, float* out) {
        by_twos<M, P, 64>(a, lda, w, panel, steps, ahead, out, [=](int j, int k) {
            return widened(w + (j / 2) * panel + k * 64L + (j % 2) * 32);
        });
    }
};

template <>
struct Stored<uint16_t> {
    typedef uint16_t Query;
    static constexpr bool WIDENS = false;
    static constexpr int DEEP = 1;
    static inline void lay(Vec keys, int, float* to) { st(to, keys); }
    static inline Vec times(const Query* q, int lane, const float* keys, Vec acc) {
        int32_t two;
        memcpy(&two, q + 2 * lane, 4);
        return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(two), (__m512bh)_mm512_loadu_si512(keys));
    }
    static inline void query(const float* from, Query* to) { st(to, ld(from)), st(to + 16, ld(from + 16)); }
    static inline Vec dot(const Query* q, __m512i key, Vec acc) {
        return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(q), (__m512bh)key);
    }
    static inline Vec dot(const Query* q, const uint16_t* key, Vec acc) { return dot(q, _mm512_loadu_si512(key), acc); }
    static inline Vec dot(const Query* q, const uint16_t* key, int count, Vec acc) {
        return dot(q, _mm512_maskz_loadu_epi16((1u << count) - 1, key), acc);
    }
    static inline void join(Pair x, float* to) { interleave(x, to); }
};

#include "decoder.h"

}  // namespace

namespace fly {
const Variant avx512bf16 = {"avx512bf16", activation_bytes, scratch_bytes, forward, logits, draft, score, top, kept,
                       accepts, follow, look_up};
}
