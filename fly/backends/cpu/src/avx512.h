// What the variants with AVX-512 share, each in a namespace of its own: all but their arithmetic on bfloat16. They need its
// dot products of whole numbers (VNNI) too.

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
inline float first(Vec x) { return _mm512_cvtss_f32(x); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }
inline Vec ld(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline Vec where_above(Vec a, Vec b, Vec x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), x); }
inline Vec where_from(Vec a, Vec b, Vec x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), x); }
inline unsigned equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Vec scale2(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline void st(uint8_t* p, Vec x) {  // to nearest, and 128 above it
    const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(128));
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(whole));
}
inline Vec size_of(Vec x) { return _mm512_abs_ps(x); }
// Products of whole numbers, less what they came to for being 128 too high.
inline Vec whole(const void* sums, const int32_t* offset) {
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(sums), _mm512_loadu_si512(offset)));
}
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// 32 registers: the sums of rows times panels, two each, and the operands, which are two a panel.
constexpr Room ROOM = {14, 3, 6};

// The weights' layouts, and the values they are multiplied with.
struct Float32 {
    typedef float Act, In, Sum;
    static constexpr int STEP = 1;  // inputs a step
    static constexpr Room MOST = ROOM;
    template <int M, int P, class Ask>
    static NOINLINE void micro(const Act* a, long lda, const char* w, long panel, int steps, Ask ahead, float* out) {
        Vec acc[M][2 * P];
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int j = 0; j < 2 * P; j++) acc[m][j] = zero();
        for (int k = 0; k < steps; k++) {
            ahead.template ask<P, 128>(w, panel, k);
            Vec b[2 * P];
            UNROLL for (int j = 0; j < 2 * P; j++) b[j] = ld((const float*)(w + (j / 2) * panel + k * 128L) + (j % 2) * 16);
            UNROLL for (int m = 0; m < M; m++) {
                Vec x = set1(a[m * lda + k]);
                UNROLL for (int j = 0; j < 2 * P; j++) acc[m][j] = fma(x, b[j], acc[m][j]);
            }
        }
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int j = 0; j < 2 * P; j++) st(out + m * 32 * P + j * 16, acc[m][j]);
    }
};

// Four whole numbers of each side at once, which is exact.
struct Whole8 {
    typedef uint16_t Act;
    typedef uint8_t In;
    typedef int32_t Sum;
    static constexpr int STEP = 4;
    static constexpr Room MOST = ROOM;
    template <int M, int P, class Ask>
    static NOINLINE void micro(const In* a, long lda, const char* w, long panel, int steps, Ask ahead, Sum* out) {
        __m512i acc[M][2 * P];
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int j = 0; j < 2 * P; j++) acc[m][j] = _mm512_setzero_si512();
        for (int k = 0; k < steps; k++) {
            ahead.template ask<P, 128>(w, panel, k);
            __m512i b[2 * P];
            UNROLL for (int j = 0; j < 2 * P; j++)
                b[j] = _mm512_loadu_si512(w + (j / 2) * panel + k * 128L + (j % 2) * 64);
            UNROLL for (int m = 0; m < M; m++) {
                int32_t four;
                memcpy(&four, a + m * lda + 4 * k, 4);
                const __m512i x = _mm512_set1_epi32(four);
                // not by the intrinsic, for which GCC keeps the sums in memory
                UNROLL for (int j = 0; j < 2 * P; j++)
                    asm("vpdpbusd %2, %1, %0" : "+v"(acc[m][j]) : "v"(x), "v"(b[j]));
            }
        }
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int j = 0; j < 2 * P; j++) _mm512_storeu_si512(out + m * 32 * P + j * 16, acc[m][j]);
    }
};

// The sums of 16 vectors' lanes, by one tree for all of them.
ALWAYS_INLINE Vec sums(Vec r[16]) {
    for (int i = 0; i < 16; i += 2)
        r[i] = add(_mm512_unpacklo_ps(r[i], r[i + 1]), _mm512_unpackhi_ps(r[i], r[i + 1]));
    for (int i = 0; i < 16; i += 4) {
        const __m512d a = _mm512_castps_pd(r[i]), b = _mm512_castps_pd(r[i + 2]);
        r[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 16; i += 8)
        r[i] = add(_mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd));
    return add(_mm512_shuffle_f32x4(r[0], r[8], 0x88), _mm512_shuffle_f32x4(r[0], r[8], 0xdd));
}

// The order of that tree: pairs of these, pairs of pairs, and so on.
constexpr int LANES[16] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};

// Rows to columns.
ALWAYS_INLINE void transpose(Vec r[16]) {
    UNROLL for (int i = 0; i < 16; i += 4) {
        const auto low = [](Vec a, Vec b) { return _mm512_castps_pd(_mm512_unpacklo_ps(a, b)); };
        const auto high = [](Vec a, Vec b) { return _mm512_castps_pd(_mm512_unpackhi_ps(a, b)); };
        const __m512d a = low(r[i], r[i + 1]), b = low(r[i + 2], r[i + 3]);
        const __m512d c = high(r[i], r[i + 1]), d = high(r[i + 2], r[i + 3]);
        r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
    }
    UNROLL for (int i = 0; i < 4; i++) {
        const Vec a = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        const Vec c = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd), d = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
        r[i] = _mm512_shuffle_f32x4(a, b, 0x88), r[i + 8] = _mm512_shuffle_f32x4(a, b, 0xdd);
        r[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88), r[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
    }
}

// Four values to each of four places.
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

// Stored values, two vectors at a time, and only ``count`` of them: one vector behind the other, or for bfloat16, which
// that is cheaper for, those at even and at odd places.
struct Pair {
    Vec first, second;
};

inline Pair pair(const float* p) { return {ld(p), ld(p + 16)}; }
inline Pair pair(const float* p, int count) {
    const uint32_t some = (1u << count) - 1;
    return {_mm512_maskz_loadu_ps((__mmask16)some, p), _mm512_maskz_loadu_ps((__mmask16)(some >> 16), p + 16)};
}
inline Pair halves(__m512i two) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(two, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(two, _mm512_set1_epi32((int)0xffff0000)))};
}
inline Pair pair(const uint16_t* p) { return halves(_mm512_loadu_si512(p)); }
inline Pair pair(const uint16_t* p, int count) { return halves(_mm512_maskz_loadu_epi16((1u << count) - 1, p)); }

// Values at even and at odd places to one behind the other.
inline void interleave(Pair x, float* to) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    st(to, _mm512_permutex2var_ps(x.first, low, x.second));
    st(to + 16, _mm512_permutex2var_ps(x.first, _mm512_add_epi32(low, _mm512_set1_epi32(8)), x.second));
}

// Keys and values of a type, and the queries that keys are multiplied with: 32 at a time. ``lay`` and ``times`` do for keys
// that are transposed what ``dot`` does for a key, lane by lane: 16 keys' dwords of a lane (of float32 in the first half of
// the 32 values, or in the second), and the products with them, of DEEP vectors a lane.
template <class K>
struct Stored;

template <>
struct Stored<float> {
    typedef float Query;
    static constexpr bool WIDENS = false;
    static constexpr int DEEP = 2;
    static inline void lay(Vec keys, int half, float* to) { st(to + half * 16, keys); }
    static inline Vec times(const Query* q, int lane, const float* keys, Vec acc) {
        return fma(set1(q[16 + lane]), ld(keys + 16), fma(set1(q[lane]), ld(keys), acc));
    }
    static inline void query(const float* from, Query* to) { memcpy(to, from, 32 * sizeof(float)); }
    static inline Vec dot(const Query* q, Pair key, Vec acc) { return fma(ld(q + 16), key.second, fma(ld(q), key.first, acc)); }
    static inline Vec dot(const Query* q, const float* key, Vec acc) { return dot(q, pair(key), acc); }
    static inline Vec dot(const Query* q, const float* key, int count, Vec acc) { return dot(q, pair(key, count), acc); }
    static inline void join(Pair x, float* to) { st(to, x.first), st(to + 16, x.second); }
};
