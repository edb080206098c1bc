// Processors with AVX-512 but not its bfloat16 dot products (Cascade Lake, Ice Lake, and machines that hide them): narrow
// types are widened to float32 in registers.
#include <immintrin.h>
#include <sched.h>
#include <string.h>

#include "fly.h"

namespace {

using namespace fly;

#include "avx512.h"

// 32 registers: the sums of rows times panels, two each, and the operands, which are four a panel.
constexpr Room WIDENED = {12, 1, 3};

inline void st(uint16_t* p, Vec x) {  // to nearest, ties to even; a nan stays one
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0))));
}

// Products of two inputs at a time with 16 outputs, of which ``two`` gives the weights in float32.
template <int M, int P, int BYTES, class Ask, class Two>
ALWAYS_INLINE void by_twos(const float* a, long lda, const char* w, long panel, int steps, Ask ahead, float* out, Two two) {
    Vec acc[M][2 * P];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < 2 * P; j++) acc[m][j] = zero();
    for (int k = 0; k < steps; k++) {
        ahead.template ask<P, BYTES>(w, panel, k);
        Pair b[2 * P];
        UNROLL for (int j = 0; j < 2 * P; j++) b[j] = two(j, k);
        UNROLL for (int m = 0; m < M; m++) {
            const Vec first = set1(a[m * lda + 2 * k]), second = set1(a[m * lda + 2 * k + 1]);
            UNROLL for (int j = 0; j < 2 * P; j++) acc[m][j] = fma(second, b[j].second, fma(first, b[j].first, acc[m][j]));
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < 2 * P; j++) st(out + m * 32 * P + j * 16, acc[m][j]);
}

struct BFloat16 {
    typedef float Act, In, Sum;
    static constexpr int STEP = 2;
    static constexpr Room MOST = WIDENED;
    template <int M, int P, class Ask>
    static NOINLINE void micro(const Act* a, long lda, const char* w, long panel, int steps, Ask ahead, float* out) {
        by_twos<M, P, 128>(a, lda, w, panel, steps, ahead, out, [=](int j, int k) {
            return pair((const uint16_t*)(w + (j / 2) * panel + k * 128L + (j % 2) * 64));
        });
    }
};

struct Int8 {
    typedef float Act, In, Sum;
    static constexpr int STEP = 2;
    static constexpr Room MOST = WIDENED;
    static inline Vec widened(const char* w) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)w)));
    }
    template <int M, int P, class Ask>
    static NOINLINE void micro(const Act* a, long lda, const char* w, long panel, int steps, Ask ahead, float* out) {
        by_twos<M, P, 64>(a, lda, w, panel, steps, ahead, out, [=](int j, int k) {
            const char* at = w + (j / 2) * panel + k * 64L + (j % 2) * 32;
            return Pair{widened(at), widened(at + 16)};
        });
    }
};

template <>
struct Stored<uint16_t> {
    typedef float Query;
    static constexpr bool WIDENS = true;  // reading it takes more than loading it
    static constexpr int DEEP = 2;
    static inline void lay(Vec keys, int, float* to) {
        const Pair two = halves(_mm512_castps_si512(keys));
        st(to, two.first), st(to + 16, two.second);
    }
    static inline Vec times(const Query* q, int lane, const float* keys, Vec acc) {
        return Stored<float>::times(q, lane, keys, acc);
    }
    static inline void query(const float* from, Query* to) {
        for (int i = 0; i < 32; i++) to[i % 2 * 16 + i / 2] = from[i];
    }
    static inline Vec dot(const Query* q, Pair key, Vec acc) { return fma(ld(q + 16), key.second, fma(ld(q), key.first, acc)); }
    static inline Vec dot(const Query* q, const uint16_t* key, Vec acc) { return dot(q, pair(key), acc); }
    static inline Vec dot(const Query* q, const uint16_t* key, int count, Vec acc) { return dot(q, pair(key, count), acc); }
    static inline void join(Pair x, float* to) { interleave(x, to); }
};

#include "decoder.h"

}  // namespace

namespace fly {
const Variant avx512 = {"avx512", activation_bytes, scratch_bytes, forward, logits, draft, score, top, kept,
                       accepts, follow, look_up};
}
