// Processors with AVX-512 but not its bfloat16 dot products (Cascade Lake, Ice Lake, and machines that hide them): narrow
// types are widened to float32 in registers. Knows nothing of models; decoder.h does.
#include <immintrin.h>
#include <string.h>

#include "fly.h"

namespace {

using namespace fly;

#include "avx512.h"

inline void st(uint16_t* p, Vec x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)rounded(x))); }

// Two inputs at a time. Their weights are widened.
struct BFloat16 {
    typedef uint16_t Weight;
    typedef float Act, In, Sum;
    typedef Vec Sums;
    static constexpr int TYPE = BFLOAT16;
    static constexpr Room MAX_BLOCK = {12, 1, 3};  // 32 registers: the sums, two a panel, and the operands, which are four
    static ALWAYS_INLINE Pair weights(const char* w) { return pair((const uint16_t*)w); }
    static ALWAYS_INLINE Pair inputs(const In* a) { return {set1(a[0]), set1(a[1])}; }
    static ALWAYS_INLINE void add(Vec& acc, Pair x, Pair b) { acc = fma(x.second, b.second, fma(x.first, b.first, acc)); }
};

#include "decoder.h"

}  // namespace

const Variant fly::avx512 = CODE("avx512", false);
