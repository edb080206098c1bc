// Processors with AVX-512 and its bfloat16 dot products (Zen 4, Sapphire Rapids and later). Knows nothing of models;
// decoder.h does.
#include <immintrin.h>
#include <string.h>

#include "fly.h"

namespace {

using namespace fly;

#include "avx512.h"

inline void st(uint16_t* p, Vec x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }

// Two inputs at a time, in products of bfloat16.
struct BFloat16 {
    typedef uint16_t Weight, Act, In;
    typedef float Sum;
    typedef Vec Sums;
    static constexpr int TYPE = BFLOAT16;
    static constexpr Room MAX_BLOCK = ROOM;
    static ALWAYS_INLINE __m512bh weights(const char* w) { return (__m512bh)_mm512_loadu_si512(w); }
    static ALWAYS_INLINE __m512bh inputs(const In* a) { return (__m512bh)fours(a); }
    static ALWAYS_INLINE void add(Vec& acc, __m512bh x, __m512bh b) { acc = _mm512_dpbf16_ps(acc, x, b); }
};

// Products of two numbers at a time: of a query's two values and a key's, and of two tokens' weights and values. For that,
// weights are rounded to bfloat16, as flash attention does in PyTorch.
template <>
struct Stored<uint16_t> {
    typedef uint16_t Query, Value;
    static constexpr int DEEP = 1, TOKENS = 2;
    static inline void lay(Vec keys, int, float* to, long) { st(to, keys); }
    static inline Vec spread(const Query* q, int lane, int) { return (Vec)fours(q + 2 * lane); }
    static inline Vec times(Vec part, Vec keys, Vec acc) { return _mm512_dpbf16_ps(acc, (__m512bh)part, (__m512bh)keys); }
    static inline void query(const float* from, Query* to) { st(to, ld(from)), st(to + 16, ld(from + 16)); }
    static inline Vec dot(const Query* q, Vec acc, __m512i key) {
        return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(q), (__m512bh)key);
    }
    static inline Vec dot(const Query* q, Vec acc, const uint16_t* key) { return dot(q, acc, _mm512_loadu_si512(key)); }
    static inline Vec dot(const Query* q, Vec acc, const uint16_t* key, int left) { return dot(q, acc, some_of(key, left)); }
    // A product adds the upper numbers first, then the lower ones. So the earlier token is the upper one, and sums run over
    // tokens in ascending order whatever pairs they form: weights of 0 between them change nothing.
    static inline Pair pairs(__m512i one, __m512i next) {
        return {(Vec)_mm512_unpacklo_epi16(next, one), (Vec)_mm512_unpackhi_epi16(next, one)};
    }
    static inline void narrow(Vec weights, float* to) {
        const __m256i both = (__m256i)_mm512_cvtneps_pbh(weights);
        _mm256_storeu_si256((__m256i*)to, _mm256_or_si256(_mm256_slli_epi32(both, 16), _mm256_srli_epi32(both, 16)));
    }
    static inline Pair taken(const Value* const* value, long from) {
        return pairs(_mm512_loadu_si512(value[0] + from), _mm512_loadu_si512(value[1] + from));
    }
    static inline Pair taken(const Value* const* value, long from, int left) {
        return pairs(some_of(value[0] + from, left), some_of(value[1] + from, left));
    }
    // The weights must be packed by ``narrow_weights``.
    static inline Vec spread_weight(const float* weights, int token) { return set1(weights[token / 2]); }
    static inline void join(Pair x, float* to) {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        st(to, _mm512_permutex2var_ps(x.first, low, x.second));
        st(to + 16, _mm512_permutex2var_ps(x.first, _mm512_add_epi32(low, _mm512_set1_epi32(8)), x.second));
    }
};

#include "decoder.h"

}  // namespace

const Variant fly::avx512bf16 = CODE("avx512bf16", false);
const Variant fly::amx = CODE("amx", true);  // the same code, but for products on tiles (amx.cpp)
