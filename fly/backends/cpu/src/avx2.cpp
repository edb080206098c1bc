// Processors with AVX2 and FMA. Narrow types are widened to float32 in registers. Knows nothing of models; decoder.h does.
#include <immintrin.h>
#include <string.h>

#include "fly.h"

namespace {

using namespace fly;

constexpr int W = 8;
typedef __m256 Vec;
typedef uint32_t Bits __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));

inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec ld(const float* p) { return _mm256_loadu_ps(p); }
inline void st(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
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
    return (Vec)((Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
}
inline Vec where_above(Vec a, Vec b, Vec x) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ), x); }
inline Vec where_from(Vec a, Vec b, Vec x) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ), x); }
inline unsigned equal(Vec a, Vec b) { return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
inline void st(uint8_t* p, Vec x) {  // to nearest, plus 128
    const __m256i whole = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(128));
    const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(half, half));
}
inline void st(int8_t* p, Vec x) {
    const __m256i whole = _mm256_cvtps_epi32(x);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(half, half));
}
inline Vec ld_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Vec ld_int8(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
inline Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale2(Vec x, Vec n) {  // x · 2ⁿ in two steps, as 2ⁿ alone may overflow
    n = _mm256_min_ps(_mm256_max_ps(n, set1(-252.0f)), set1(254.0f));
    const Ints whole = (Ints)_mm256_cvtps_epi32(n), half = whole >> 1, rest = whole - half;
    return x * (Vec)((half + 127) << 23) * (Vec)((rest + 127) << 23);
}

#include "ahead.h"
#include "vectors.h"

inline void st(uint16_t* p, Vec x) {
    const __m256i bits = (__m256i)rounded(x);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08)));
}

// Products of M rows with P panels, one step of inputs at a time. The type ``Wt`` defines how weights and inputs are
// read and multiplied.
template <class Wt, int M, int P, class Ask>
NOINLINE void multiply(const typename Wt::In* a, long lda, const char* w, long panel, int steps, Ask ahead,
                       typename Wt::Sum* out) {
    constexpr int STEP = layout_of(Wt::TYPE).step, BYTES = STEP * PANEL * sizeof(typename Wt::Weight), V = Wt::VECTORS;
    typename Wt::Sums acc[M][V * P];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < V * P; j++) acc[m][j] = typename Wt::Sums{};
    for (int k = 0; k < steps; k++) {
        ahead.template ask<P, BYTES>(w, panel, k);
        UNROLL for (int j = 0; j < V * P; j++) {
            const auto b = Wt::weights(w + (j / V) * panel + k * (long)BYTES, j % V);
            UNROLL for (int m = 0; m < M; m++) Wt::add(acc[m][j], a + m * lda + STEP * k, b);
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < P; j++) Wt::store(acc[m] + j * V, out + (m * P + j) * PANEL);
}

// The types of weights, and of the values that they are multiplied with.
struct Floats {
    typedef float Act, In, Sum;
    typedef Vec Sums;
    static constexpr Room MAX_BLOCK = {2, 0, 1};  // of 16 registers
    static constexpr int VECTORS = 4;
    static ALWAYS_INLINE void store(const Vec* acc, float* out) {
        UNROLL for (int j = 0; j < 4; j++) st(out + j * 8, acc[j]);
    }
};

struct Float32 : Floats {
    typedef float Weight;
    static constexpr int TYPE = FLOAT32;
    static ALWAYS_INLINE Vec weights(const char* w, int j) { return ld((const float*)w + j * 8); }
    static ALWAYS_INLINE void add(Vec& acc, const float* a, Vec b) { acc = fma(set1(*a), b, acc); }
};

// Two inputs at a time. Their weights are widened.
struct BFloat16 : Floats {
    typedef uint16_t Weight;
    static constexpr int TYPE = BFLOAT16;
    static ALWAYS_INLINE Pair weights(const char* w, int j) { return pair((const uint16_t*)w + j * 16); }
    static ALWAYS_INLINE void add(Vec& acc, const float* a, Pair b) {
        acc = fma(set1(a[1]), b.second, fma(set1(a[0]), b.first, acc));
    }
};

// Both sides are widened to 16 bits, so that sums of two products are exact.
struct Whole8 {
    typedef int8_t Weight;
    typedef float Act;
    typedef uint8_t In;
    typedef int32_t Sum;
    typedef __m256i Sums;  // of 4 outputs each: for the first two inputs and for the last two
    static constexpr int TYPE = W8A8;
    static constexpr Room MAX_BLOCK = Floats::MAX_BLOCK;
    static constexpr int VECTORS = 8;
    static ALWAYS_INLINE __m256i weights(const char* w, int j) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + j * 16)));
    }
    static ALWAYS_INLINE void add(__m256i& acc, const In* a, __m256i b) {
        int32_t four;
        memcpy(&four, a, 4);
        acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_set1_epi32(four)), b));
    }
    static ALWAYS_INLINE void store(const __m256i* acc, Sum* out) {
        UNROLL for (int j = 0; j < 8; j += 2) {
            const __m256i sums = _mm256_hadd_epi32(acc[j], acc[j + 1]);  // of 4 outputs, two by two
            _mm256_storeu_si256((__m256i*)(out + j * 4), _mm256_permute4x64_epi64(sums, 0xd8));
        }
    }
};

inline __m256i fours(const void* from) {
    int32_t four;
    memcpy(&four, from, 4);
    return _mm256_set1_epi32(four);
}

// Products of whole numbers within a group: unsigned weights of 8 outputs by 4 inputs, and signed inputs. With 8 bits,
// both are widened to 16 bits first, even and odd places apart, because products of bytes would not fit.
template <int BITS>
struct Dots {
    typedef __m256i Sums;
    static ALWAYS_INLINE __m256i numbers(const char* w) { return _mm256_loadu_si256((const __m256i*)w); }
    static ALWAYS_INLINE void add(__m256i& acc, const int8_t* a, __m256i b) {
        const __m256i x = fours(a), even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd = _mm256_srai_epi16(x, 8);
        acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_and_si256(b, _mm256_set1_epi16(255)), even));
        acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_srli_epi16(b, 8), odd));
    }
    static ALWAYS_INLINE Vec total(__m256i acc) { return _mm256_cvtepi32_ps(acc); }
};

struct TwoSteps {
    __m256i first, second;
};

// With weights of 4 bits, the pairs of a whole group fit into 16 bits: at most 8 · 2 · 15 · 127 = 30,480.
template <>
struct Dots<4> {
    typedef __m256i Sums;
    static ALWAYS_INLINE TwoSteps numbers(const char* w) {
        const __m256i both = _mm256_loadu_si256((const __m256i*)w), lower = _mm256_set1_epi8(15);
        return {_mm256_and_si256(both, lower), _mm256_and_si256(_mm256_srli_epi16(both, 4), lower)};
    }
    static ALWAYS_INLINE void add(__m256i& acc, const int8_t* a, TwoSteps b) {
        acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(b.first, fours(a)));
        acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(b.second, fours(a + 4)));
    }
    static ALWAYS_INLINE Vec total(__m256i acc) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(acc, _mm256_set1_epi16(1))); }
};

// Computes, for each of 64 outputs, the sum of the inputs with its weights' signs (fly.h: Sketch). Four bits choose one of 16
// sums of four inputs from a table. SIGNED / 2 is added to each of these, so that they are unsigned bytes. Even and odd bytes
// are summed separately, in 16 bits.
NOINLINE void signed_sums(const uint8_t* bits, const uint8_t* tables, int eighths, uint16_t* sums) {
    const __m256i four = _mm256_set1_epi8(15), lower = _mm256_set1_epi16(255);
    __m256i even[2] = {}, odd[2] = {};
    for (int i = 0; i < eighths; i++, bits += 64, tables += 32) {
        const auto table = [&](int at) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(tables + at))); };
        UNROLL for (int half = 0; half < 2; half++) {
            const __m256i both = _mm256_loadu_si256((const __m256i*)(bits + 32 * half));
            const __m256i sum =
                _mm256_add_epi8(_mm256_shuffle_epi8(table(0), _mm256_and_si256(both, four)),
                                _mm256_shuffle_epi8(table(16), _mm256_and_si256(_mm256_srli_epi16(both, 4), four)));
            even[half] = _mm256_add_epi16(even[half], _mm256_and_si256(sum, lower));
            odd[half] = _mm256_add_epi16(odd[half], _mm256_srli_epi16(sum, 8));
        }
    }
    UNROLL for (int half = 0; half < 2; half++) {
        _mm256_storeu_si256((__m256i*)(sums + 16 * half), even[half]);
        _mm256_storeu_si256((__m256i*)(sums + 32 + 16 * half), odd[half]);
    }
}

// Matrices in groups. The number of rows at once: 16 registers hold, for each row, two total sums and one of a group.
struct Grouped {
    typedef uint8_t Weight;
    typedef float Act;
    typedef int8_t In;
    typedef float Sum;
    static constexpr int TYPE = GROUPED;
    static constexpr Room MAX_BLOCK = {4, 0, 0};
};

// The sums of 8 vectors' lanes, by one tree for all of them.
ALWAYS_INLINE Vec sums(Vec r[8]) {
    Vec four[2];
    for (int i = 0; i < 2; i++)
        four[i] = _mm256_hadd_ps(_mm256_hadd_ps(r[4 * i], r[4 * i + 1]), _mm256_hadd_ps(r[4 * i + 2], r[4 * i + 3]));
    return _mm256_permute2f128_ps(four[0], four[1], 0x20) + _mm256_permute2f128_ps(four[0], four[1], 0x31);
}

// The order of that tree: pairs of lanes, then pairs of pairs, and so on.
constexpr int LANES[8] = {0, 1, 2, 3, 4, 5, 6, 7};

// Transposes rows to columns.
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

// Copies four values to each half.
inline void fours(Vec x, float* to, long apart) {
    _mm_storeu_ps(to, _mm256_castps256_ps128(x));
    _mm_storeu_ps(to + apart, _mm256_extractf128_ps(x, 1));
}

// Where ``keep`` is not 0, ``x``; elsewhere ``other``.
inline Vec where(const uint8_t* keep, Vec x, Vec other) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)keep));
    return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(_mm256_cmpeq_epi32(bytes, _mm256_setzero_si256())));
}

template <class K>
inline Pair some_of(const K* p, int count) {
    K some[16] = {};
    memcpy(some, p, count * sizeof(K));
    return pair(some);
}
inline Pair pair(const float* p, int count) { return some_of(p, count); }
inline Pair pair(const uint16_t* p, int count) { return some_of(p, count); }
inline void interleave(Pair x, float* to) {
    const Vec low = _mm256_unpacklo_ps(x.first, x.second), high = _mm256_unpackhi_ps(x.first, x.second);
    st(to, _mm256_permute2f128_ps(low, high, 0x20)), st(to + 8, _mm256_permute2f128_ps(low, high, 0x31));
}

#include "decoder.h"

}  // namespace

const Variant fly::avx2 = CODE("avx2", false);
