// Processors with AVX2 and FMA. Narrow types are widened to float32 in registers.
#include <immintrin.h>
#include <sched.h>
#include <string.h>

#include "fly.h"

namespace {

using namespace fly;

constexpr int W = 8;
typedef __m256 Vec;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec ld(const float* p) { return _mm256_loadu_ps(p); }
inline void st(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline float first(Vec x) { return _mm256_cvtss_f32(x); }
inline float sum(Vec x) {
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
}
inline float largest(Vec x) {
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}
inline Vec ld(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline void st(uint16_t* p, Vec x) {  // to nearest, ties to even; a nan stays one
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
inline Vec where_above(Vec a, Vec b, Vec x) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ), x); }
inline Vec where_from(Vec a, Vec b, Vec x) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ), x); }
inline unsigned equal(Vec a, Vec b) { return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
inline void st(uint8_t* p, Vec x) {  // to nearest, and 128 above it
    const __m256i whole = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(128));
    const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(half, half));
}
inline Vec size_of(Vec x) { return _mm256_andnot_ps(set1(-0.0f), x); }
// Products of whole numbers, less what they came to for being 128 too high.
inline Vec whole(const void* sums, const int32_t* offset) {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_loadu_si256((const __m256i*)sums),
                                               _mm256_loadu_si256((const __m256i*)offset)));
}
inline Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale2(Vec x, Vec n) {  // x · 2ⁿ in two halves, as 2ⁿ alone may not be a number
    n = _mm256_min_ps(_mm256_max_ps(n, set1(-252.0f)), set1(254.0f));
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    auto power = [](__m256i e) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
    };
    return mul(mul(x, power(half)), power(rest));
}

constexpr Room ROOM = {2, 0, 1};  // of 16 registers

struct Float32 {
    typedef float Act, In, Sum;
    static constexpr int STEP = 1;
    static constexpr Room MOST = ROOM;
    template <int M, int P, class Ask>
    static NOINLINE void micro(const Act* a, long lda, const char* w, long panel, int steps, Ask ahead, float* out) {
        Vec acc[M][4 * P];
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int j = 0; j < 4 * P; j++) acc[m][j] = zero();
        for (int k = 0; k < steps; k++) {
            ahead.template ask<P, 128>(w, panel, k);
            UNROLL for (int j = 0; j < 4 * P; j++) {
                Vec b = ld((const float*)(w + (j / 4) * panel + k * 128L) + (j % 4) * 8);
                UNROLL for (int m = 0; m < M; m++) acc[m][j] = fma(set1(a[m * lda + k]), b, acc[m][j]);
            }
        }
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int j = 0; j < 4 * P; j++) st(out + m * 32 * P + j * 8, acc[m][j]);
    }
};

// Two vectors: of stored values one behind the other, or for bfloat16, which that is cheaper for, those at even and at odd
// places; of weights those of two inputs.
struct Pair {
    Vec first, second;
};

inline Pair halves(__m256i two) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(two, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(two, _mm256_set1_epi32((int)0xffff0000)))};
}

// Products of two inputs at a time with 8 outputs, of which ``two`` gives the weights in float32.
template <int M, int P, int BYTES, class Ask, class Two>
ALWAYS_INLINE void by_twos(const float* a, long lda, const char* w, long panel, int steps, Ask ahead, float* out, Two two) {
    Vec acc[M][4 * P];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < 4 * P; j++) acc[m][j] = zero();
    for (int k = 0; k < steps; k++) {
        ahead.template ask<P, BYTES>(w, panel, k);
        UNROLL for (int j = 0; j < 4 * P; j++) {
            const Pair b = two(j, k);
            UNROLL for (int m = 0; m < M; m++) {
                acc[m][j] = fma(set1(a[m * lda + 2 * k]), b.first, acc[m][j]);
                acc[m][j] = fma(set1(a[m * lda + 2 * k + 1]), b.second, acc[m][j]);
            }
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < 4 * P; j++) st(out + m * 32 * P + j * 8, acc[m][j]);
}

struct BFloat16 {
    typedef float Act, In, Sum;
    static constexpr int STEP = 2;
    static constexpr Room MOST = ROOM;
    template <int M, int P, class Ask>
    static NOINLINE void micro(const Act* a, long lda, const char* w, long panel, int steps, Ask ahead, float* out) {
        by_twos<M, P, 128>(a, lda, w, panel, steps, ahead, out, [=](int j, int k) {
            return halves(_mm256_loadu_si256((const __m256i*)(w + (j / 4) * panel + k * 128L + (j % 4) * 32)));
        });
    }
};

struct Int8 {
    typedef float Act, In, Sum;
    static constexpr int STEP = 2;
    static constexpr Room MOST = ROOM;
    static inline Vec widened(const char* w) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)w)));
    }
    template <int M, int P, class Ask>
    static NOINLINE void micro(const Act* a, long lda, const char* w, long panel, int steps, Ask ahead, float* out) {
        by_twos<M, P, 64>(a, lda, w, panel, steps, ahead, out, [=](int j, int k) {
            const char* at = w + (j / 4) * panel + k * 64L + (j % 4 / 2) * 32 + (j % 2) * 8;
            return Pair{widened(at), widened(at + 16)};
        });
    }
};

// Widened to 16 bits, of which two products at once are exact.
struct Whole8 {
    typedef float Act;
    typedef uint8_t In;
    typedef int32_t Sum;
    static constexpr int STEP = 4;
    static constexpr Room MOST = ROOM;
    template <int M, int P, class Ask>
    static NOINLINE void micro(const In* a, long lda, const char* w, long panel, int steps, Ask ahead, Sum* out) {
        __m256i acc[M][8 * P];  // of 4 outputs each, the first two inputs and the last
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int j = 0; j < 8 * P; j++) acc[m][j] = _mm256_setzero_si256();
        for (int k = 0; k < steps; k++) {
            ahead.template ask<P, 128>(w, panel, k);
            UNROLL for (int j = 0; j < 8 * P; j++) {
                const char* at = w + (j / 8) * panel + k * 128L + (j % 8) * 16;
                const __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at));
                UNROLL for (int m = 0; m < M; m++) {
                    int32_t four;
                    memcpy(&four, a + m * lda + 4 * k, 4);
                    const __m256i x = _mm256_cvtepu8_epi16(_mm_set1_epi32(four));
                    acc[m][j] = _mm256_add_epi32(acc[m][j], _mm256_madd_epi16(x, b));
                }
            }
        }
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int j = 0; j < 8 * P; j += 2) {
                const __m256i sums = _mm256_hadd_epi32(acc[m][j], acc[m][j + 1]);  // of 4 outputs, two by two
                _mm256_storeu_si256((__m256i*)(out + m * 32 * P + j * 4), _mm256_permute4x64_epi64(sums, 0xd8));
            }
    }
};

// The sums of 8 vectors' lanes, by one tree for all of them.
ALWAYS_INLINE Vec sums(Vec r[8]) {
    Vec four[2];
    for (int i = 0; i < 2; i++)
        four[i] = _mm256_hadd_ps(_mm256_hadd_ps(r[4 * i], r[4 * i + 1]), _mm256_hadd_ps(r[4 * i + 2], r[4 * i + 3]));
    return add(_mm256_permute2f128_ps(four[0], four[1], 0x20), _mm256_permute2f128_ps(four[0], four[1], 0x31));
}

// The order of that tree: pairs of these, pairs of pairs, and so on.
constexpr int LANES[8] = {0, 1, 2, 3, 4, 5, 6, 7};

// Rows to columns.
ALWAYS_INLINE void transpose(Vec r[8]) {
    UNROLL for (int i = 0; i < 8; i += 4) {
        const auto low = [](Vec a, Vec b) { return _mm256_castps_pd(_mm256_unpacklo_ps(a, b)); };
        const auto high = [](Vec a, Vec b) { return _mm256_castps_pd(_mm256_unpackhi_ps(a, b)); };
        const __m256d a = low(r[i], r[i + 1]), b = low(r[i + 2], r[i + 3]);
        const __m256d c = high(r[i], r[i + 1]), d = high(r[i + 2], r[i + 3]);
        r[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), r[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
        r[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(c, d)), r[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(c, d));
    }
    UNROLL for (int i = 0; i < 4; i++) {
        const Vec a = r[i], b = r[i + 4];
        r[i] = _mm256_permute2f128_ps(a, b, 0x20), r[i + 4] = _mm256_permute2f128_ps(a, b, 0x31);
    }
}

// Four values to each of two places.
inline void fours(Vec x, float* to, long apart) {
    _mm_storeu_ps(to, _mm256_castps256_ps128(x));
    _mm_storeu_ps(to + apart, _mm256_extractf128_ps(x, 1));
}

// Where ``keep`` is not 0, ``x``; elsewhere ``other``.
inline Vec where(const uint8_t* keep, Vec x, Vec other) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)keep));
    return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(_mm256_cmpeq_epi32(bytes, _mm256_setzero_si256())));
}

// Stored values, two vectors at a time, and only ``count`` of them.
inline Pair pair(const float* p) { return {ld(p), ld(p + 8)}; }
inline Pair pair(const uint16_t* p) { return halves(_mm256_loadu_si256((const __m256i*)p)); }
template <class K>
inline Pair pair(const K* p, int count) {
    K some[16] = {};
    memcpy(some, p, count * sizeof(K));
    return pair(some);
}

// Keys and values of a type, and the queries that keys are multiplied with, which lie as pairs do: 16 at a time. ``lay`` and
// ``times`` do for keys that are transposed what ``dot`` does for a key, lane by lane: 8 keys' dwords of a lane (of
// float32 in the first half of the 16 values, or in the second), and the products with them, of DEEP vectors a lane.
template <class K>
struct Stored {
    typedef float Query;
    static constexpr bool APART = sizeof(K) == 2, WIDENS = APART;  // reading it takes more than loading it
    static constexpr int DEEP = 2;
    static inline void lay(Vec keys, int half, float* to) {
        if (!APART) return st(to + half * 8, keys);
        const Pair two = halves(_mm256_castps_si256(keys));
        st(to, two.first), st(to + 8, two.second);
    }
    static inline Vec times(const Query* q, int lane, const float* keys, Vec acc) {
        return fma(set1(q[8 + lane]), ld(keys + 8), fma(set1(q[lane]), ld(keys), acc));
    }
    static inline void query(const float* from, Query* to) {
        for (int i = 0; i < 16; i++) to[APART ? i % 2 * 8 + i / 2 : i] = from[i];
    }
    static inline Vec dot(const Query* q, Pair key, Vec acc) { return fma(ld(q + 8), key.second, fma(ld(q), key.first, acc)); }
    static inline Vec dot(const Query* q, const K* key, Vec acc) { return dot(q, pair(key), acc); }
    static inline Vec dot(const Query* q, const K* key, int count, Vec acc) { return dot(q, pair(key, count), acc); }
    static inline void join(Pair x, float* to) {
        const Vec low = _mm256_unpacklo_ps(x.first, x.second), high = _mm256_unpackhi_ps(x.first, x.second);
        st(to, APART ? _mm256_permute2f128_ps(low, high, 0x20) : x.first);
        st(to + 8, APART ? _mm256_permute2f128_ps(low, high, 0x31) : x.second);
    }
};

#include "decoder.h"

}  // namespace

namespace fly {
const Variant avx2 = {"avx2", activation_bytes, scratch_bytes, forward, logits, draft, score, top, kept,
                       accepts, follow, look_up};
}
