// Code that is the same in all variants, for vectors of any width: ``Vec`` of ``W`` floats, ``Bits`` and ``Ints`` of as
// many whole numbers. A variant defines set1, ld, st, fma and others before it includes this. Knows nothing of models.

inline Vec zero() { return Vec{}; }
inline Vec abs_of(Vec x) { return (Vec)((Bits)x & 0x7fffffff); }
// Converts sums of integer products to floats. The inputs were stored plus 128, which added ``offset`` to each sum.
inline Vec sums_to_floats(const float* sums, const int32_t* offset) {
    return __builtin_convertvector((Ints)ld(sums) - (Ints)ld((const float*)offset), Vec);
}
inline void st(uint16_t* p, Vec x);  // to nearest, ties to even; a nan stays one

// The upper halves of floats, rounded to nearest, ties to even; a nan stays one.
inline Bits rounded(Vec x) {
    const Bits bits = (Bits)x;
    return x == x ? (bits + (bits >> 16 & 1) + 0x7fff) >> 16 : Bits{} + 0x7fc0;
}

// Two vectors. For float32 they hold the first and the second half of the values. For bfloat16 they hold the values at
// even and at odd places, which is cheaper. For weights and their inputs they hold those of two inputs.
struct Pair {
    Vec first, second;
};

inline Pair halves(Vec two) { return {(Vec)((Bits)two << 16), (Vec)((Bits)two & 0xffff0000)}; }
inline Pair pair(const float* p) { return {ld(p), ld(p + W)}; }
inline Pair pair(const uint16_t* p) { return halves(ld((const float*)p)); }
inline Pair pair(const float* p, int count);  // only ``count`` values, then zeros
inline Pair pair(const uint16_t* p, int count);
inline void interleave(Pair x, float* to);  // from even and odd places to consecutive ones

// How keys and values of a type are read, and how queries are laid out for them: 2·W values at a time (as a Pair), or
// as many as are ``left``. ``dot`` multiplies a query with one key. ``spread`` and ``times`` do the same for W transposed
// keys, lane by lane. A lane has 32 bits of each key, in DEEP vectors (for float32, the first half of the 2·W values,
// then the second), which ``lay`` writes ``apart``.
template <class K>
struct InFloats {
    typedef float Query;
    static constexpr bool WIDENS = sizeof(K) < 4;  // reading it takes more than loading it
    static constexpr int DEEP = 2;
    static inline void lay(Vec keys, int half, float* to, long apart) {
        if (!WIDENS) return st(to + half * apart, keys);
        const Pair two = halves(keys);
        st(to, two.first), st(to + apart, two.second);
    }
    static inline Vec spread(const Query* q, int lane, int deep) { return set1(q[deep * W + lane]); }
    static inline Vec times(Vec part, Vec keys, Vec acc) { return fma(part, keys, acc); }
    static inline void query(const float* from, Query* to) {
        for (int i = 0; i < 2 * W; i++) to[WIDENS ? i % 2 * W + i / 2 : i] = from[i];
    }
    template <class... Left>
    static inline Vec dot(const Query* q, Vec acc, const K* key, Left... left) {
        const Pair two = pair(key, left...);
        return fma(ld(q + W), two.second, fma(ld(q), two.first, acc));
    }
    // Weighted sums of values take ``TOKENS`` tokens at a time: 2·W values of each (``taken``), and their weights as
    // ``spread_weight`` lays them out. ``join`` puts what was taken into the order of the values.
    typedef K Value;
    static constexpr int TOKENS = 1;
    template <class... Left>
    static inline Pair taken(const K* const* value, long from, Left... left) { return pair(*value + from, left...); }
    static inline Vec spread_weight(const float* weights, int token) { return set1(weights[token]); }
    static inline void join(Pair x, float* to) {
        if (WIDENS) return interleave(x, to);
        st(to, x.first), st(to + W, x.second);
    }
};

template <class K>
struct Stored : InFloats<K> {};

inline Vec exponential(Vec x) {
    x = larger(set1(-104.0f), x);  // in this order a NaN stays a NaN
    const Vec n = nearest(x * set1(1.44269504f));
    const Vec r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
    Vec sum = set1(1.9875691500e-4f);
    constexpr float OTHERS[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    UNROLL for (float factor : OTHERS) sum = fma(sum, r, set1(factor));
    return scale2(fma(sum, r * r, r + set1(1.0f)), n);
}

// ``count`` values in another type, and zeros up to ``room`` (0: none).
template <class From, class To>
inline void convert(const From* from, int count, To* to, int room = 0) {
    int i = 0;
    for (; i + W <= count; i += W) st(to + i, ld(from + i));
    if (i < count) {
        From in[W] = {};
        To out[W];
        memcpy(in, from + i, (count - i) * sizeof(From));
        st(out, ld(in));
        memcpy(to + i, out, (count - i) * sizeof(To));
    }
    if (count < room) memset(to + count, 0, (room - count) * sizeof(To));
}

// x / rms(x) · weight over C values; weight and result are padded to 32 with zeros.
template <class Out>
inline void normalise(const float* x, const float* weight, int width, float eps, Out* out) {
    const int room = padded(width);
    Vec squares[2] = {zero(), zero()};
    for (int i = 0; i < room; i += 2 * W)
        for (int j = 0; j < 2; j++) {
            const Vec value = ld(x + i + j * W);
            squares[j] = fma(value, value, squares[j]);
        }
    const Vec factor = set1(1.0f / __builtin_sqrtf(sum(squares[0] + squares[1]) / (float)width + eps));
    for (int i = 0; i < room; i += W) st(out + i, ld(x + i) * factor * ld(weight + i));
}

// Rounds ``count`` values, padded to 16, to multiples of a step, which is 1/127 of the largest absolute value. Stores
// the multiples plus 128, and returns the step, which is NaN if a value is NaN or infinite.
template <class Act>
inline float round_to_8_bits(const Act* from, int count, uint8_t* to) {
    Vec most = zero(), poison = zero();
    for (int i = 0; i < count; i += W) {
        const Vec x = ld(from + i);
        most = larger(most, abs_of(x)), poison = fma(x, zero(), poison);  // the larger of two may lose a NaN
    }
    const float peak = largest(most) + sum(poison);
    const Vec inverse = set1(peak > 0 ? 127.0f / peak : 0.0f);
    for (int i = 0; i < count; i += W) st(to + i, ld(from + i) * inverse);
    return peak / 127.0f;
}
