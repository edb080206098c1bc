// Shared by the variants with AVX-512: all but their arithmetic on bfloat16. They also need its integer dot products
// (VNNI). Knows nothing of models.

constexpr int W = 16;
typedef __m512 Vec;
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec ld(const float* p) { return _mm512_loadu_ps(p); }
inline void st(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void st(int32_t* p, __m512i x) { _mm512_storeu_si512(p, x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }
inline Vec ld(const uint16_t* p) {
    return (Vec)((Bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
}
inline Vec where_above(Vec a, Vec b, Vec x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), x); }
inline Vec where_from(Vec a, Vec b, Vec x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), x); }
inline unsigned equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Vec scale2(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline void st(uint8_t* p, Vec x) {  // to nearest, plus 128
    const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(128));
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(whole));
}
inline void st(int8_t* p, Vec x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); }
inline Vec ld_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec ld_int8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
typedef int32_t Four __attribute__((may_alias));
// The same four bytes everywhere.
inline __m512i fours(const void* from) {
    int32_t four;
    memcpy(&four, from, 4);
    return _mm512_set1_epi32(four);
}

#include "ahead.h"
#include "vectors.h"

// 32 registers: the sums of rows times panels, two each, and the operands, which are two a panel.
constexpr Room ROOM = {14, 3, 6};

// Products of M rows with P panels, one step of inputs at a time. The type ``Wt`` defines how weights and inputs are
// read and multiplied.
template <class Wt, int M, int P, class Ask>
NOINLINE void multiply(const typename Wt::In* a, long lda, const char* w, long panel, int steps, Ask ahead,
                       typename Wt::Sum* out) {
    constexpr int STEP = layout_of(Wt::TYPE).step, BYTES = STEP * PANEL * sizeof(typename Wt::Weight);
    typename Wt::Sums acc[M][2 * P];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < 2 * P; j++) acc[m][j] = typename Wt::Sums{};
    for (int k = 0; k < steps; k++) {
        ahead.template ask<P, BYTES>(w, panel, k);
        decltype(Wt::weights(w)) b[2 * P];
        UNROLL for (int j = 0; j < 2 * P; j++) b[j] = Wt::weights(w + (j / 2) * panel + k * (long)BYTES + (j % 2) * (BYTES / 2));
        UNROLL for (int m = 0; m < M; m++) {
            const auto x = Wt::inputs(a + m * lda + STEP * k);
            UNROLL for (int j = 0; j < 2 * P; j++) Wt::add(acc[m][j], x, b[j]);
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < 2 * P; j++) st(out + m * 32 * P + j * 16, acc[m][j]);
}

// The types of weights, and of the values that they are multiplied with.
struct Float32 {
    typedef float Weight, Act, In, Sum;
    typedef Vec Sums;
    static constexpr int TYPE = FLOAT32;
    static constexpr Room MAX_BLOCK = ROOM;
    static ALWAYS_INLINE Vec weights(const char* w) { return ld((const float*)w); }
    static ALWAYS_INLINE Vec inputs(const In* a) { return set1(*a); }
    static ALWAYS_INLINE void add(Vec& acc, Vec x, Vec b) { acc = fma(x, b, acc); }
};

// Four pairs of whole numbers at once, which is exact.
struct Whole8 {
    typedef int8_t Weight;
    typedef uint16_t Act;
    typedef uint8_t In;
    typedef int32_t Sum;
    typedef __m512i Sums;
    static constexpr int TYPE = W8A8;
    static constexpr Room MAX_BLOCK = ROOM;
    static ALWAYS_INLINE __m512i weights(const char* w) { return _mm512_loadu_si512(w); }
    static ALWAYS_INLINE __m512i inputs(const In* a) { return fours(a); }
    static ALWAYS_INLINE void add(__m512i& acc, __m512i x, __m512i b) {
        // not the intrinsic, with which GCC keeps the sums in memory
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(x), "v"(b));
    }
    // Adds to M rows' sums of 16 outputs (beside.h), two steps at a time.
    template <int M>
    static NOINLINE void multiply_half(const int8_t* a, const char* w, int steps, const char* fetched, int each, int32_t* sums) {
        const __m512i top = _mm512_set1_epi8((char)128);
        __m512i acc[M];
        UNROLL for (int m = 0; m < M; m++) acc[m] = _mm512_loadu_si512(sums + m * PANEL);
        for (; steps > 0; steps -= 2, a += 128, w += 2 * 4 * PANEL, fetched += 2 * each)
            UNROLL for (int i = 0; i < 2; i++) {
                M > 8 ? fetch_close(fetched + i * each) : fetch(fetched + i * each);
                const __m512i b = _mm512_xor_si512(_mm512_loadu_si512(w + i * 4 * PANEL), top);
                UNROLL for (int m = 0; m < M; m++)
                    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc[m]) : "v"(b), "m"(*(const Four*)(a + i * 64 + m * 4)));
            }
        UNROLL for (int m = 0; m < M; m++) st(sums + m * PANEL, acc[m]);
    }
};

// Products of whole numbers within a group: unsigned weights of 16 outputs by 4 inputs, and signed inputs.
struct DotsOf8 {
    typedef __m512i Sums;
    static ALWAYS_INLINE __m512i numbers(const char* w) { return _mm512_loadu_si512(w); }
    static ALWAYS_INLINE void add(__m512i& acc, const int8_t* a, __m512i b) {
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(b), "v"(fours(a)));  // as Whole8 does
    }
    static ALWAYS_INLINE Vec total(__m512i acc) { return _mm512_cvtepi32_ps(acc); }
};
template <int BITS>
struct Dots : DotsOf8 {};

struct TwoSteps {
    __m512i first, second;
};

template <>
struct Dots<4> : DotsOf8 {
    static ALWAYS_INLINE TwoSteps numbers(const char* w) {
        const __m512i both = _mm512_loadu_si512(w), lower = _mm512_set1_epi8(15);
        return {_mm512_and_si512(both, lower), _mm512_and_si512(_mm512_srli_epi16(both, 4), lower)};
    }
    static ALWAYS_INLINE void add(__m512i& acc, const int8_t* a, TwoSteps b) {
        DotsOf8::add(acc, a, b.first), DotsOf8::add(acc, a + 4, b.second);
    }
};

// Computes, for each of 64 outputs, the sum of the inputs with its weights' signs (fly.h: Sketch). Four bits choose one of 16
// sums of four inputs from a table. SIGNED / 2 is added to each of these, so that they are unsigned bytes. Even and odd bytes
// are summed separately, in 16 bits.
NOINLINE void signed_sums(const uint8_t* bits, const uint8_t* tables, int eighths, uint16_t* sums) {
    const __m512i four = _mm512_set1_epi8(15), lower = _mm512_set1_epi16(255);
    __m512i even = _mm512_setzero_si512(), odd = even;
    for (int i = 0; i < eighths; i++, bits += 64, tables += 32) {
        const auto table = [&](int at) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(tables + at))); };
        const __m512i both = _mm512_loadu_si512(bits);
        const __m512i sum = _mm512_add_epi8(_mm512_shuffle_epi8(table(0), _mm512_and_si512(both, four)),
                                            _mm512_shuffle_epi8(table(16), _mm512_and_si512(_mm512_srli_epi16(both, 4), four)));
        even = _mm512_add_epi16(even, _mm512_and_si512(sum, lower));
        odd = _mm512_add_epi16(odd, _mm512_srli_epi16(sum, 8));
    }
    _mm512_storeu_si512(sums, even), _mm512_storeu_si512(sums + 32, odd);
}

// Matrices in groups. The number of rows at once: 32 registers hold two sums of each row, for the group and in total.
struct Grouped {
    typedef uint8_t Weight;
    typedef uint16_t Act;
    typedef int8_t In;
    typedef float Sum;
    static constexpr int TYPE = GROUPED;
    static constexpr Room MAX_BLOCK = {12, 0, 0};
};

// The sums of 16 vectors' lanes, by one tree for all of them.
ALWAYS_INLINE Vec sums(Vec r[16]) {
    for (int i = 0; i < 16; i += 2) r[i] = _mm512_unpacklo_ps(r[i], r[i + 1]) + _mm512_unpackhi_ps(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4) {
        const __m512d a = _mm512_castps_pd(r[i]), b = _mm512_castps_pd(r[i + 2]);
        r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
    const auto add_halves = [](Vec a, Vec b) { return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd); };
    return add_halves(add_halves(r[0], r[4]), add_halves(r[8], r[12]));
}

// The order of that tree: pairs of lanes, then pairs of pairs, and so on.
constexpr int LANES[16] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};

// Transposes rows to columns.
ALWAYS_INLINE void transpose(Vec r[16]) {
    UNROLL for (int i = 0; i < 16; i += 4) {
        const auto low = [](Vec a, Vec b) { return _mm512_castps_pd(_mm512_unpacklo_ps(a, b)); };
        const auto high = [](Vec a, Vec b) { return _mm512_castps_pd(_mm512_unpackhi_ps(a, b)); };
        const __m512d a = low(r[i], r[i + 1]), b = low(r[i + 2], r[i + 3]);
        const __m512d c = high(r[i], r[i + 1]), d = high(r[i + 2], r[i + 3]);
        r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
    }
    // Of two quarters' vectors, the quarters at even and at odd places: once for each two rows of four, then for all.
    const auto even_odd = [](Vec& a, Vec& b) {
        const Vec even = _mm512_shuffle_f32x4(a, b, 0x88);
        b = _mm512_shuffle_f32x4(a, b, 0xdd), a = even;
    };
    UNROLL for (int i = 0; i < 4; i++) {
        even_odd(r[i], r[i + 4]), even_odd(r[i + 8], r[i + 12]);
        even_odd(r[i], r[i + 8]), even_odd(r[i + 4], r[i + 12]);
    }
}

// Lays rows of inputs, which were stored plus 128, side by side (beside.h): ``inputs`` of each, a multiple of 64.
template <class Row>
inline void lay_beside(const Row* a, long lda, int rows, int inputs, int8_t* to, int32_t* excess) {
    const __m512i top = _mm512_set1_epi8((char)128), ones = _mm512_set1_epi8(1);
    __m512i total = _mm512_setzero_si512();
    for (int from = 0; from < inputs; from += 64, to += 16 * 64) {
        Vec r[16];
        for (int m = 0; m < 16; m++)
            r[m] = m < rows ? (Vec)_mm512_xor_si512(_mm512_loadu_si512(a + m * lda + from), top) : zero();
        transpose(r);
        for (int step = 0; step < 16; step++) {
            st((float*)to + step * 16, r[step]);
            asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(ones), "v"(r[step]));
        }
    }
    alignas(64) int32_t sums[16];
    st(sums, total);
    for (int m = 0; m < rows; m++) excess[m] = 128 * sums[m];
}

// Copies four values to each quarter.
inline void fours(Vec x, float* to, long apart) {
    _mm_storeu_ps(to, _mm512_castps512_ps128(x));
    _mm_storeu_ps(to + apart, _mm512_extractf32x4_ps(x, 1));
    _mm_storeu_ps(to + 2 * apart, _mm512_extractf32x4_ps(x, 2));
    _mm_storeu_ps(to + 3 * apart, _mm512_extractf32x4_ps(x, 3));
}

// Where ``keep`` is not 0, ``x``; elsewhere ``other``.
inline Vec where(const uint8_t* keep, Vec x, Vec other) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)keep);
    return _mm512_mask_mov_ps(other, _mm_test_epi8_mask(bytes, bytes), x);
}

inline Pair pair(const float* p, int count) {
    const uint32_t some = (1u << count) - 1;
    return {_mm512_maskz_loadu_ps((__mmask16)some, p), _mm512_maskz_loadu_ps((__mmask16)(some >> 16), p + 16)};
}
inline __m512i some_of(const uint16_t* p, int count) { return _mm512_maskz_loadu_epi16((1u << count) - 1, p); }
inline Pair pair(const uint16_t* p, int count) { return halves(_mm512_castsi512_ps(some_of(p, count))); }
inline void interleave(Pair x, float* to) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    st(to, _mm512_permutex2var_ps(x.first, low, x.second));
    st(to + 16, _mm512_permutex2var_ps(x.first, _mm512_add_epi32(low, _mm512_set1_epi32(8)), x.second));
}
