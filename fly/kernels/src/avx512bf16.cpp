// Processors with AVX-512 and its bfloat16 dot products (Zen 4, Cooper Lake, Sapphire Rapids and later).
#include <immintrin.h>
#include <sched.h>
#include <string.h>

#include "fly.h"

namespace {

using namespace fly;

constexpr int W = 16;
typedef __m512 Vec;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec ld(const float* p) { return _mm512_loadu_ps(p); }
inline void st(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }
inline Vec ld(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void st(uint16_t* p, Vec x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
inline Vec where_above(Vec a, Vec b, Vec x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), x); }
inline Vec where_from(Vec a, Vec b, Vec x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), x); }
inline unsigned equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Vec scale2(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// The weights' layouts, and the values they are multiplied with.
struct Float32 {
    typedef float Act;
    static constexpr int STEP = 1;  // inputs a step
    template <int M, int P>
    static inline void micro(const Act* a, long lda, const char* w, long panel, int steps, float* out) {
        Vec acc[M][2 * P];
        for (int m = 0; m < M; m++)
            for (int j = 0; j < 2 * P; j++) acc[m][j] = zero();
        for (int k = 0; k < steps; k++) {
            Vec b[2 * P];
            for (int j = 0; j < 2 * P; j++) b[j] = ld((const float*)(w + (j / 2) * panel + k * 128L) + (j % 2) * 16);
            for (int m = 0; m < M; m++) {
                Vec x = set1(a[m * lda + k]);
                for (int j = 0; j < 2 * P; j++) acc[m][j] = fma(x, b[j], acc[m][j]);
            }
        }
        for (int m = 0; m < M; m++)
            for (int j = 0; j < 2 * P; j++) st(out + m * 32 * P + j * 16, acc[m][j]);
    }
};

struct BFloat16 {
    typedef uint16_t Act;
    static constexpr int STEP = 2;
    template <int M, int P>
    static inline void micro(const Act* a, long lda, const char* w, long panel, int steps, float* out) {
        Vec acc[M][2 * P];
        for (int m = 0; m < M; m++)
            for (int j = 0; j < 2 * P; j++) acc[m][j] = zero();
        for (int k = 0; k < steps; k++) {
            __m512bh b[2 * P];
            for (int j = 0; j < 2 * P; j++)
                b[j] = (__m512bh)_mm512_loadu_si512(w + (j / 2) * panel + k * 128L + (j % 2) * 64);
            for (int m = 0; m < M; m++) {
                int32_t two;
                memcpy(&two, a + m * lda + 2 * k, 4);
                __m512bh x = (__m512bh)_mm512_set1_epi32(two);
                for (int j = 0; j < 2 * P; j++) acc[m][j] = _mm512_dpbf16_ps(acc[m][j], x, b[j]);
            }
        }
        for (int m = 0; m < M; m++)
            for (int j = 0; j < 2 * P; j++) st(out + m * 32 * P + j * 16, acc[m][j]);
    }
};

struct Int8 {
    typedef float Act;
    static constexpr int STEP = 1;
    template <int M, int P>
    static inline void micro(const Act* a, long lda, const char* w, long panel, int steps, float* out) {
        Vec acc[M][2 * P];
        for (int m = 0; m < M; m++)
            for (int j = 0; j < 2 * P; j++) acc[m][j] = zero();
        for (int k = 0; k < steps; k++) {
            Vec b[2 * P];
            for (int j = 0; j < 2 * P; j++) {
                __m128i bytes = _mm_loadu_si128((const __m128i*)(w + (j / 2) * panel + k * 32L + (j % 2) * 16));
                b[j] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
            }
            for (int m = 0; m < M; m++) {
                Vec x = set1(a[m * lda + k]);
                for (int j = 0; j < 2 * P; j++) acc[m][j] = fma(x, b[j], acc[m][j]);
            }
        }
        for (int m = 0; m < M; m++)
            for (int j = 0; j < 2 * P; j++) st(out + m * 32 * P + j * 16, acc[m][j]);
    }
};

// 32 registers: rows times panels of two, and room for the operands.
constexpr int MAX_ROWS = 14;
constexpr int most_panels(int rows) { return rows <= 3 ? 4 : rows <= 6 ? 2 : 1; }

inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// The first ``count`` words of 32 bits of 16 keys, word by word: [count padded to 16 with zeros, 16].
inline void across(const void* const key[16], int count, void* out) {
    for (int at = 0; at < count; at += 16) {
        __mmask16 some = count - at >= 16 ? 0xffff : (__mmask16)((1u << (count - at)) - 1);
        __m512i r[16];
        for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(some, (const int32_t*)key[i] + at);
        transpose(r);
        for (int i = 0; i < 16; i++) _mm512_store_si512((int32_t*)out + (at + i) * 16, r[i]);
    }
}

// Keys as they are multiplied with queries: 16 at once, word by word.
template <class K>
struct Keys;

template <>
struct Keys<float> {
    typedef float Query;
    static int words(int d) { return d; }
    static void block(const float* const key[16], int d, void* out) { across((const void* const*)key, d, out); }
    static inline Vec step(const Query* q, int word, const void* block, Vec acc) {
        return fma(set1(q[word]), ld((const float*)block + word * 16), acc);
    }
};

template <>
struct Keys<uint16_t> {
    typedef uint16_t Query;
    static int words(int d) { return (d + 1) / 2; }
    static void block(const uint16_t* const key[16], int d, void* out) {
        across((const void* const*)key, words(d), out);
    }
    static inline Vec step(const Query* q, int word, const void* block, Vec acc) {
        int32_t two;
        memcpy(&two, q + 2 * word, 4);
        return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(two),
                                (__m512bh)_mm512_load_si512((const int32_t*)block + word * 16));
    }
};

// Scores of NQ queries with a block of 16 keys. Four chains a score, always the same ones.
template <class K, int NQ>
inline void score(const typename Keys<K>::Query* q, long ldq, const void* block, int words, float* out, long ldo) {
    Vec acc[NQ][4];
    for (int i = 0; i < NQ; i++)
        for (int c = 0; c < 4; c++) acc[i][c] = zero();
    for (int word = 0; word < words; word += 4)  // words beyond are zeros on both sides
        for (int c = 0; c < 4; c++)
            for (int i = 0; i < NQ; i++) acc[i][c] = Keys<K>::step(q + i * ldq, word + c, block, acc[i][c]);
    for (int i = 0; i < NQ; i++)
        st(out + i * ldo, add(add(acc[i][0], acc[i][1]), add(acc[i][2], acc[i][3])));
}

#include "decoder.h"

}  // namespace

namespace fly {
const Variant avx512bf16 = {"avx512bf16", activation_bytes, scratch_bytes, forward, logits, draft};
}
