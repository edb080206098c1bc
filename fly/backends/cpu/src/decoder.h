// The decoder, written once for all variants: each includes this in a namespace of its own, behind its vector type
// ``Vec`` of ``W`` floats, its products ``micro`` and what it makes of stored keys and values. Threads run the same code side by side, each on its
// part, and meet at barriers.
//
// The distribution of this file: a value is computed by the same operations in the same order, however many tokens, rows and
// threads there are, and wherever the row's pages lie. A product is summed over its inputs in ascending order; a
// token's attention over the stored tokens it sees, in ascending order, those it does not see adding exact zeros.

constexpr long LONG = 1 << 20;      // bytes of a matrix, for few rows, that take long
constexpr int SHARES = 12;          // parts of a thread's part, about
constexpr long KEPT = 1 << 20;      // bytes of a matrix up to which it is taken to stay in the processor's caches
constexpr int AHEAD = 8192;         // bytes that are asked for ahead, of all panels multiplied at once
constexpr int64_t STALL = 500000;  // nanoseconds at one barrier, which parts of equal size do not take

// Whatever is still on the way to memory must have been seen by all before anybody goes on. ``counts``: it should not
// take long.
inline void wait(Call* call, bool counts = true) {
    if (call->threads == 1) return;
    Barrier* barrier = &call->barrier;
    int32_t phase = __atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == call->threads) {
        __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&call->taken, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&barrier->phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; spins < 1000; spins++) {
        if (__atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE) != phase) return;
        fly::pause();
    }
    // Whoever we wait for may have lost the processor, or need this one.
    const int64_t since = nanoseconds();
    while (__atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE) == phase) sched_yield();
    const int64_t waited = nanoseconds() - since;
    if (counts && waited > STALL) __atomic_add_fetch(&call->stalled, waited, __ATOMIC_RELAXED);
}

struct Range {
    int from, to;
};

inline Range part(int count, int thread, int threads) {
    return {(int)((long)count * thread / threads), (int)((long)count * (thread + 1) / threads)};
}

inline Vec exponential(Vec x) {
    x = larger(set1(-104.0f), x);  // in this order a nan stays one
    Vec n = nearest(mul(x, set1(1.44269504f)));
    Vec r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    Vec sum = set1(1.9875691500e-4f);
    sum = fma(sum, r, set1(1.3981999507e-3f));
    sum = fma(sum, r, set1(8.3334519073e-3f));
    sum = fma(sum, r, set1(4.1665795894e-2f));
    sum = fma(sum, r, set1(1.6666665459e-1f));
    sum = fma(sum, r, set1(5.0000001201e-1f));
    sum = fma(sum, mul(r, r), add(r, set1(1.0f)));
    return scale2(sum, n);
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
            Vec value = ld(x + i + j * W);
            squares[j] = fma(value, value, squares[j]);
        }
    const Vec factor = set1(1.0f / __builtin_sqrtf(sum(add(squares[0], squares[1])) / (float)width + eps));
    for (int i = 0; i < room; i += W) st(out + i, mul(mul(ld(x + i), factor), ld(weight + i)));
}

template <class Wt, int M = Wt::MOST.rows, Asked ASKED>
inline void run(int rows, int panels, const typename Wt::In* a, long lda, const char* w, long panel, int steps,
                Ahead<ASKED> ahead, typename Wt::Sum* out) {
    if (rows == M) {
        if constexpr (Wt::MOST.panels(M) >= 4)
            if (panels == 4) return Wt::template micro<M, 4>(a, lda, w, panel, steps, ahead, out);
        if constexpr (Wt::MOST.panels(M) >= 2)
            if (panels == 2) return Wt::template micro<M, 2>(a, lda, w, panel, steps, ahead, out);
        return Wt::template micro<M, 1>(a, lda, w, panel, steps, ahead, out);
    }
    constexpr bool SEVERAL = ASKED == Asked::HALF || ASKED == Asked::NONE;  // blocks, of about the same size
    if constexpr (M > (SEVERAL ? (Wt::MOST.rows + 1) / 2 : 1))
        return run<Wt, M - 1>(rows, panels, a, lda, w, panel, steps, ahead, out);
    __builtin_unreachable();
}

// Rows of activations as products take them, and of W8A8 what 1 stands for in each.
template <class Wt>
struct Inputs {
    const typename Wt::In* a;
    long lda;
    int rows;
    const float* steps;
};

// Rows are multiplied in blocks of about the same size, each with some panels at once.
inline int blocks_of(Room most, int rows) { return (rows + most.rows - 1) / most.rows; }
inline int panels_at_once(Room most, int rows) {
    return most.panels((rows + blocks_of(most, rows) - 1) / blocks_of(most, rows));
}

template <class Wt>
constexpr bool WHOLE = sizeof(typename Wt::In) == 1;

// x·Wᵀ for rows of activations and the panels of ``range``; ``finish(row, panel, sums)`` takes 32 sums each. At ``then``
// lies what the thread is likely to multiply next.
template <class Wt, class Finish>
inline void product_of(const Inputs<Wt>& x, const Matrix& matrix, Range range, Place then, Finish finish) {
    alignas(64) typename Wt::Sum sums[Wt::MOST.rows * PANEL * 4];
    const int blocks = blocks_of(Wt::MOST, x.rows), steps = (matrix.k + Wt::STEP - 1) / Wt::STEP;
    const long bytes = matrix.panel_bytes;
    for (int p = range.from, panels; p < range.to; p += panels) {
        panels = panels_at_once(Wt::MOST, x.rows);
        while (panels > range.to - p) panels /= 2;
        const char* w = matrix.data + p * bytes;
        const Place next = p + panels < range.to ? Place{w + panels * bytes, bytes} : then;
        const long near = AHEAD / panels < bytes ? AHEAD / panels : bytes;
        for (int block = 0; block < blocks; block++) {
            const Range some = part(x.rows, block, blocks);
            const int count = some.to - some.from;
            const auto multiply = [&](auto ahead) {
                run<Wt>(count, panels, x.a + some.from * x.lda, x.lda, w, bytes, steps, ahead, sums);
            };
            // Of several blocks the last two ask for half of the next panels each, for memory to be busy all the while.
            if (block < blocks - 2)
                multiply(Ahead<Asked::NONE>{});
            else if (blocks > 1)
                multiply(Ahead<Asked::HALF>{block == blocks - 1 ? bytes + bytes / 2 : bytes, next});
            else if (bytes * matrix.panels < KEPT)
                multiply(Ahead<Asked::FEW>{near, next});
            else
                multiply(Ahead<Asked::MANY>{near, next});
            for (int row = 0; row < count; row++)
                for (int j = 0; j < panels; j++) {
                    float* mine = (float*)(sums + (row * panels + j) * PANEL);
                    const int at = (p + j) * PANEL;
                    if constexpr (WHOLE<Wt>) {
                        const Vec step = set1(x.steps[some.from + row]);
                        for (int i = 0; i < PANEL; i += W) st(mine + i, mul(whole(mine + i, matrix.offset + at + i), step));
                    }
                    if (matrix.scale)
                        for (int i = 0; i < PANEL; i += W) st(mine + i, mul(ld(mine + i), ld(matrix.scale + at + i)));
                    if (matrix.bias)
                        for (int i = 0; i < PANEL; i += W) st(mine + i, add(ld(mine + i), ld(matrix.bias + at + i)));
                    finish(some.from + row, p + j, mine);
                }
        }
    }
}

// How many panels a thread takes at a time of a product that is long: it may lose its processor for a while. 0: its part
// of all at once.
inline int panels_a_turn(const Call* call, const Matrix& matrix, Room most, int rows) {
    const long work = matrix.panel_bytes * matrix.panels * (rows < 4 ? 1 : rows / 4);
    if (call->threads == 1 || work < LONG) return 0;
    const int least = panels_at_once(most, rows), share = matrix.panels / (call->threads * SHARES);
    return share >= least ? share / least * least : share > 0 ? share : 1;
}

// All panels, by all threads: each its part, or a few after a few. There is a barrier between two of them; ``next`` is the
// matrix that is likely to come behind that.
template <class Wt, class Finish>
inline void product(Call* call, int thread, const Inputs<Wt>& x, const Matrix& matrix, const Matrix& next, Finish finish) {
    const int size = panels_a_turn(call, matrix, Wt::MOST, x.rows), after = panels_a_turn(call, next, Wt::MOST, x.rows);
    const int first = after ? after * thread : part(next.panels, thread, call->threads).from;
    const Place then = {next.data + first * next.panel_bytes, next.panel_bytes};
    if (!size) return product_of(x, matrix, part(matrix.panels, thread, call->threads), then, finish);
    for (int at; (at = __atomic_fetch_add(&call->taken, size, __ATOMIC_RELAXED)) < matrix.panels;) {
        const int soon = at + size * call->threads;  // if all go on alike
        product_of(x, matrix, {at, at + size < matrix.panels ? at + size : matrix.panels},
                   soon < matrix.panels ? Place{matrix.data + soon * matrix.panel_bytes, matrix.panel_bytes} : then, finish);
    }
}

// ``count`` values in steps of 1/127 of the largest, 128 above that, and what a step is. They are padded to 16.
template <class Act>
inline float narrowed(const Act* from, int count, uint8_t* to) {
    Vec most = zero();
    for (int i = 0; i < count; i += W) most = larger(most, size_of(ld(from + i)));
    const float peak = largest(most);
    const Vec inverse = set1(peak > 0 ? 127.0f / peak : 0.0f);
    for (int i = 0; i < count; i += W) st(to + i, mul(ld(from + i), inverse));
    return peak / 127.0f;
}

// Buffers of a thread's own, for attention over at most S stored tokens.
constexpr int QUERIES = 32;             // queries whose scores are held at once
constexpr int OWN_NORMS = 4;            // tokens up to which every thread normalises all by itself, to spare a barrier
constexpr int GROUP = W == 16 ? 4 : 2;  // queries whose sums are in registers at once
constexpr int BLOCK = 16;               // stored tokens that are scored at once
constexpr int TURNED = 6;               // queries of a head from which on it pays to transpose its keys

struct Scratch {
    float *scores, *out, *sums, *block;  // of the last: keys transposed, or values widened
    char* queries;
    void* normed;
    uint8_t* narrow;
    float* steps;
    long stride;  // of scores
};

// New tokens whose queries for one key/value head share a pass, and key/value heads that do.
inline int query_tokens(const Shape& shape) {
    const int per = shape.heads / shape.kv_heads;
    return per >= QUERIES ? 1 : QUERIES / per;
}

inline int query_groups(int queries) { return queries >= QUERIES ? 1 : QUERIES / queries; }

inline long lay_out(Scratch* s, char* base, const Shape& shape, int longest) {
    const int per = shape.heads / shape.kv_heads;
    const long queries = per > QUERIES ? per : QUERIES, width = padded(shape.head_dim);
    char* at = base;
    auto take = [&at](long bytes) {
        char* mine = at;
        at += (bytes + 63) / 64 * 64;
        return mine;
    };
    s->stride = padded(longest, BLOCK);
    s->scores = (float*)take(queries * s->stride * 4);
    s->out = (float*)take(queries * width * 4);
    s->sums = (float*)take(queries * 4);
    s->block = (float*)take(BLOCK * width * 4);
    s->queries = take(queries * width * 4);
    s->normed = take((long)OWN_NORMS * padded(shape.width) * 4);
    s->narrow = (uint8_t*)take(shape.weights == W8A8 ? (long)OWN_NORMS * padded(most_inputs(shape), 64) : 0);
    s->steps = (float*)take(OWN_NORMS * 4);
    return at - base;
}

long scratch_bytes(const Shape* shape, int longest) {
    Scratch s;
    return lay_out(&s, nullptr, *shape, longest);
}

// The rotated vector of one head: D values behind ``from``.
inline void rotate(const Model* model, const float* from, int64_t position, float* to) {
    const int half = model->shape.head_dim / 2;
    const float *cos = model->cos + position * half, *sin = model->sin + position * half;
    for (int i = 0; i < half; i++) {
        const float a = from[i], b = from[i + half];
        to[i] = a * cos[i] - b * sin[i];
        to[i + half] = b * cos[i] + a * sin[i];
    }
}

template <class K>
inline K* slot(const Call* call, void* base, int layer, const Row& row, int stored, int group) {
    const Shape& shape = call->model->shape;
    const long at = (long)row.table[stored / call->cache.page] * call->cache.page + stored % call->cache.page;
    return (K*)base + layer * call->cache.layer_stride + (at * shape.kv_heads + group) * shape.head_dim;
}

// Where the keys (or values) of a block's tokens lie, from those of head ``group`` on; behind the end, the last again.
template <class K>
inline void locate(const Call* call, void* base, int layer, const Row& row, int group, int from, int end,
                   const K* found[BLOCK]) {
    const Shape& shape = call->model->shape;
    const int page = call->cache.page;
    const long apart = (long)shape.kv_heads * shape.head_dim;  // of two tokens of a page
    int number = from / page, within = from % page;  // a division takes as long as a token's dot product
    const K* at = slot<K>(call, base, layer, row, from, group);
    for (int i = 0; i < BLOCK; i++) {
        found[i] = at;
        if (from + i + 1 >= end) continue;
        if (++within < page) {
            at += apart;
        } else {
            within = 0;
            at = (const K*)base + layer * call->cache.layer_stride +
                 ((long)row.table[++number] * page * shape.kv_heads + group) * shape.head_dim;
        }
    }
}

template <bool VALUE>
struct Constant {
    static constexpr bool value = VALUE;
};

// Asks for the line at ``p`` of keys (or values), once where 2·W of them are less than a line. Into the second level of the
// caches: the first waits for too few lines at once to keep memory busy.
template <class K>
ALWAYS_INLINE void soon(const K* p) {
    constexpr int BYTES = 2 * W * (int)sizeof(K);
    if (BYTES < 64 && (uintptr_t)p % 64 >= BYTES) return;
    UNROLL for (int i = 0; i < BYTES; i += 64) fetch((const char*)p + i);
}

// Goes over the keys (or values) of the tokens up to ``end``, a block at a time: ``use(first, where, then)``, with the place
// of each token's, those of all of ``groups`` side by side, and the place of those to ask for meanwhile, some blocks later.
// Behind the last keys these are the first values, which the walk over values relies on.
template <class K, class Use>
inline void walk(const Call* call, bool keys, int layer, const Row& row, Range groups, int end, Use use) {
    constexpr int RING = 5;
    const K* ring[RING][BLOCK];
    const int d = call->model->shape.head_dim, count = groups.to - groups.from, blocks = (end + BLOCK - 1) / BLOCK;
    const int ahead = count >= 4 ? 1 : 4;  // blocks
    auto find = [&](int block) {
        const bool here = block < blocks;
        const int behind = keys && block - blocks < blocks ? block - blocks : blocks - 1;
        locate(call, here && keys ? call->cache.keys : call->cache.values, layer, row, groups.from,
               (here ? block : behind) * BLOCK, end, ring[block % RING]);
    };
    for (int block = 0; block < ahead; block++) {
        find(block);
        if (keys)
            for (const K* at : ring[block])
                for (int i = 0; i < count * d; i += 2 * W) soon(at + i);
    }
    for (int block = 0; block < blocks; block++) {
        find(block + ahead);
        use(block * BLOCK, ring[block % RING], ring[(block + ahead) % RING]);
    }
}

// Keys and values of the new tokens of a piece, one key/value head.
template <class K>
void store(const Call* call, const Piece& piece, int layer, int group) {
    const Model* model = call->model;
    const Shape& shape = model->shape;
    const int d = shape.head_dim;
    const long ld_qkv = (long)model->layers[0].qkv.panels * PANEL;
    const Row& row = call->row[piece.row];
    alignas(64) float rotated[1024];
    for (int n = piece.from; n < piece.to; n++) {
        const int at = piece.at + n - piece.from;
        const float* key = model->work.qkv + at * ld_qkv + (long)(shape.heads + group) * d;
        rotate(model, key, call->position[call->tile_at + at], rotated);
        convert(rotated, d, slot<K>(call, call->cache.keys, layer, row, row.start + n, group));
        convert(key + (long)shape.kv_heads * d, d, slot<K>(call, call->cache.values, layer, row, row.start + n, group));
    }
}

// Queries, and where the scores of each go: rows some values apart.
template <class K>
struct Asking {
    const typename Stored<K>::Query* query;
    long width;
    float* out;
    long stride;
};

// Scores of NQ queries, each with the same W / NQ keys of the head that lies ``offset[i]`` on: W products at a time, each
// summed up lane by lane over the head's width, then by one tree over the lanes. ASK: for the keys at ``then``, too, once
// for neighbours of one head.
template <class K, int NQ, bool ASK>
inline void score(Asking<K> who, const int offset[NQ], const K* const* key, const K* const* then, int d) {
    constexpr int NK = W / NQ;
    Vec acc[W];
    UNROLL for (int i = 0; i < W; i++) acc[i] = zero();
    int at = 0;
    for (; at + 2 * W <= d; at += 2 * W)
        UNROLL for (int i = 0; i < W; i++) {
            const long from = offset[i / NK] + at;
            if (ASK && (i < NK || offset[i / NK] != offset[i / NK - 1])) soon(then[i % NK] + from);
            acc[i] = Stored<K>::dot(who.query + i / NK * who.width + at, key[i % NK] + from, acc[i]);
        }
    if (at < d)
        UNROLL for (int i = 0; i < W; i++) {
            const long from = offset[i / NK] + at;
            if (ASK && (i < NK || offset[i / NK] != offset[i / NK - 1])) soon(then[i % NK] + from);
            acc[i] = Stored<K>::dot(who.query + i / NK * who.width + at, key[i % NK] + from, d - at, acc[i]);
        }
    const Vec all = sums(acc);
    if constexpr (NQ == 1)
        st(who.out, all);
    else
        fours(all, who.out, who.stride);
}

// Adds NV vectors of each of ``count`` values, weighed by each of NQ queries; SUM adds up the weights as well, in their
// order, as for a branch of a tree other places lie between. Of the last two vectors only ``rest`` values are there, where
// that is less than they hold. ASK: for those at ``then``, too.
template <int NQ, int NV, bool SUM, bool ASK, class K>
inline void weigh(const Scratch& s, long width, int query, int key, int count, const K* const* value,
                  const K* const* then, int offset, int at, int rest) {
    Vec acc[NQ][NV], total[NQ];
    UNROLL for (int i = 0; i < NQ; i++) {
        UNROLL for (int v = 0; v < NV; v++) acc[i][v] = ld(s.out + (query + i) * width + at + v * W);
        if (SUM) total[i] = set1(s.sums[query + i]);
    }
    const float* weights = s.scores + query * s.stride + key;
    for (int j = 0; j < count; j++) {
        Pair x[NV / 2];
        UNROLL for (int v = 0; v < NV / 2; v++) {
            if (ASK) soon(then[j] + offset + at + v * 2 * W);
            x[v] = NV == 2 && rest < 2 * W ? pair(value[j] + offset + at, rest) : pair(value[j] + offset + at + v * 2 * W);
        }
        UNROLL for (int i = 0; i < NQ; i++) {
            const Vec weight = set1(weights[i * s.stride + j]);
            UNROLL for (int v = 0; v < NV / 2; v++) {
                acc[i][2 * v] = fma(weight, x[v].first, acc[i][2 * v]);
                acc[i][2 * v + 1] = fma(weight, x[v].second, acc[i][2 * v + 1]);
            }
            if (SUM) total[i] = add(total[i], weight);
        }
    }
    UNROLL for (int i = 0; i < NQ; i++) {
        UNROLL for (int v = 0; v < NV; v++) st(s.out + (query + i) * width + at + v * W, acc[i][v]);
        if (SUM) s.sums[query + i] = first(total[i]);
    }
}

template <int NQ, bool ASK, class K>
inline void weigh(const Scratch& s, int d, int query, int key, int count, const K* const* value, const K* const* then,
                  int offset) {
    const long width = padded(d);
    int at = 0;
    if (d >= 4 * W) {
        weigh<NQ, 4, true, ASK>(s, width, query, key, count, value, then, offset, 0, 4 * W);
        at = 4 * W;
    } else {
        weigh<NQ, 2, true, ASK>(s, width, query, key, count, value, then, offset, 0, d);
        at = 2 * W;
    }
    for (; at + 4 * W <= d; at += 4 * W)
        weigh<NQ, 4, false, ASK>(s, width, query, key, count, value, then, offset, at, 4 * W);
    for (; at < d; at += 2 * W) weigh<NQ, 2, false, ASK>(s, width, query, key, count, value, then, offset, at, d - at);
}

// Up to BLOCK tokens' values of the head that lies ``offset`` on, in float32, ``room`` for each. Asks for those at ``then``.
template <class K>
inline void widen(const K* const* value, const K* const* then, int count, int offset, int d, float* to, int room) {
    for (int j = 0; j < count; j++, to += room)
        for (int at = 0; at < d; at += 2 * W) {
            const K* p = value[j] + offset + at;
            soon(then[j] + offset + at);
            const Pair x = at + 2 * W <= d ? pair(p) : pair(p, d - at);
            st(to + at, x.first), st(to + at + W, x.second);
        }
}

// W keys of the head that lies ``offset`` on, transposed: of each 2·W values a lane after a lane, W keys side by side.
template <class K>
inline void turn(const K* const* key, const K* const* then, int offset, int d, float* to) {
    constexpr int PART = W * 4 / (int)sizeof(K);  // of a key, that is a vector
    for (int at = 0; at < d; at += 2 * W, to += W * W * Stored<K>::DEEP)
        for (int half = 0; half < 2 * W / PART; half++) {
            const int from = at + half * PART, left = d - from;
            Vec rows[W];
            if (!half) UNROLL for (int j = 0; j < W; j++) soon(then[j] + offset + at);
            if (left >= PART)
                UNROLL for (int j = 0; j < W; j++) rows[j] = ld((const float*)(key[j] + offset + from));
            else
                for (int j = 0; j < W; j++) {
                    K some[PART] = {};
                    if (left > 0) memcpy(some, key[j] + offset + from, left * sizeof(K));
                    rows[j] = ld((const float*)some);
                }
            transpose(rows);
            UNROLL for (int lane = 0; lane < W; lane++) Stored<K>::lay(rows[lane], half, to + lane * W * Stored<K>::DEEP);
        }
}

template <int NQ>
struct Several {
    Vec of[NQ];
};

// Adds the products with keys that are transposed, of one lane and one step of 2·W values.
template <class K, int NQ, int LANE>
ALWAYS_INLINE void add_step(const Asking<K>& who, const float* keys, int step, Several<NQ>& all) {
    const float* mine = keys + (step * W + LANE) * W * Stored<K>::DEEP;
    UNROLL for (int i = 0; i < NQ; i++)
        all.of[i] = Stored<K>::times(who.query + i * who.width + step * 2 * W, LANE, mine, all.of[i]);
}

// These products, summed up over COUNT lanes as ``sums`` does it. STEPS: of 2·W values in a head; 0: as many as there are.
template <class K, int NQ, int STEPS, int COUNT = W, int AT = 0>
ALWAYS_INLINE Several<NQ> over_lanes(const Asking<K>& who, const float* keys, int steps) {
    Several<NQ> all;
    if constexpr (COUNT > 1) {
        const auto some = over_lanes<K, NQ, STEPS, COUNT / 2, AT>(who, keys, steps);
        const auto rest = over_lanes<K, NQ, STEPS, COUNT / 2, AT + COUNT / 2>(who, keys, steps);
        UNROLL for (int i = 0; i < NQ; i++) all.of[i] = add(some.of[i], rest.of[i]);
    } else {
        UNROLL for (int i = 0; i < NQ; i++) all.of[i] = zero();
        if constexpr (STEPS > 0)
            UNROLL for (int step = 0; step < STEPS; step++) add_step<K, NQ, LANES[AT]>(who, keys, step, all);
        else
            for (int step = 0; step < steps; step++) add_step<K, NQ, LANES[AT]>(who, keys, step, all);
    }
    return all;
}

// Scores of NQ queries with the same W keys, transposed: the same sums as of ``score``.
template <class K, int NQ>
inline void score_turned(Asking<K> who, const float* keys, int d) {
    const auto give = [&](const Several<NQ>& all) {
        UNROLL for (int i = 0; i < NQ; i++) st(who.out + i * who.stride, all.of[i]);
    };
    constexpr int USUAL = 64 / (2 * W);  // heads of 64 or 128
    const int steps = (d + 2 * W - 1) / (2 * W);
    if (steps == USUAL) return give(over_lanes<K, NQ, USUAL>(who, keys, steps));
    if (steps == 2 * USUAL) return give(over_lanes<K, NQ, 2 * USUAL>(who, keys, steps));
    give(over_lanes<K, NQ, 0>(who, keys, steps));
}

// Scores to weights: exp of what is above the largest; zero for what ``mask`` hides (null: nothing), and up to ``end``.
inline void weights_of(float* score, int sees, int end, const uint8_t* mask, Vec scale) {
    alignas(64) uint8_t last[W] = {};  // the end is no multiple of a vector, and nobody else's memory may be read
    const int whole = sees / W * W;
    for (int j = whole; j < sees; j++) last[j - whole] = mask ? mask[j] : 1;
    const Vec none = set1(-__builtin_inff());
    Vec most = none;
    for (int j = 0; j < whole; j += W) most = larger(most, mask ? where(mask + j, ld(score + j), none) : ld(score + j));
    if (whole < sees) most = larger(most, where(last, ld(score + whole), none));
    const Vec offset = set1(-largest(most));
    for (int j = 0; j < sees; j += W) {
        const Vec weight = exponential(mul(add(ld(score + j), offset), scale));
        st(score + j, j == whole ? where(last, weight, zero()) : mask ? where(mask + j, weight, zero()) : weight);
    }
    for (int j = padded(sees, W); j < end; j++) score[j] = 0;
}

// Attention of the tokens ``from`` to ``to`` of a piece's row, for the queries of some key/value heads: at most QUERIES
// of them, or those of a single token and head.
template <class K, class Act>
void attend(const Call* call, const Piece& piece, int layer, Range groups, int from, int to, const Scratch& s) {
    typedef typename Stored<K>::Query Query;
    const Model* model = call->model;
    const Shape& shape = model->shape;
    const Row& row = call->row[piece.row];
    const int d = shape.head_dim, per = shape.heads / shape.kv_heads, end = row.start + to;
    const int each = (to - from) * per, queries = each * (groups.to - groups.from);  // of a key/value head, of all
    const long width = padded(d), ld_qkv = (long)model->layers[0].qkv.panels * PANEL;
    const long ld_out = padded(shape.heads * d);
    // Query q is of key/value head q / each, of token (q % each) / per.
    auto token = [&](int q) { return from + q % each / per; };
    auto head = [&](int q) { return (groups.from + q / each) * per + q % per; };
    alignas(64) float vector[1024 + 2 * W];
    for (int i = d; i < width; i++) vector[i] = 0;
    for (int q = 0; q < queries; q++) {
        const int at = piece.at + token(q) - piece.from;
        rotate(model, model->work.qkv + at * ld_qkv + (long)head(q) * d, call->position[call->tile_at + at], vector);
        for (int i = 0; i < width; i += 2 * W) Stored<K>::query(vector + i, (Query*)s.queries + q * width + i);
    }
    // Heads of few queries are scored side by side, with few tokens each, which is the order of memory. Where a head has
    // more, its keys are transposed once for all of them, and its values widened.
    constexpr int FEW = 4, SIDE = W / FEW;
    const bool together = each < SIDE && queries >= SIDE;
    const bool turns = each >= TURNED, widens = Stored<K>::WIDENS && each > GROUP;
    int offsets[QUERIES];
    for (int q = 0; q < queries && together; q++) offsets[q] = q / each * d;
    walk<K>(call, true, layer, row, groups, end, [&](int key, const K* const* keys, const K* const* then) {
        const auto asking = [&](int q, int on) {
            return Asking<K>{(const Query*)s.queries + q * width, width, s.scores + q * s.stride + key + on, s.stride};
        };
        for (int on = 0; on < BLOCK && together; on += FEW)
            for (int q = 0; q < queries; q += SIDE) {  // the last few may be among the ones before
                const int first = q + SIDE <= queries ? q : queries - SIDE;
                score<K, SIDE, true>(asking(first, on), offsets + first, keys + on, then + on, d);
            }
        for (int q = 0, offset = 0; q < queries && !together; q += each, offset += d)
            for (int on = 0; on < BLOCK; on += W) {
                if (turns) {
                    turn<K>(keys + on, then + on, offset, d, s.block);
                    for (int n = 0; n < each; n += GROUP)
                        score_turned<K, GROUP>(asking(q + (n + GROUP <= each ? n : each - GROUP), on), s.block, d);
                    continue;
                }
                score<K, 1, true>(asking(q, on), &offset, keys + on, then + on, d);
                for (int n = 1; n < each; n++) score<K, 1, false>(asking(q + n, on), &offset, keys + on, then + on, d);
            }
    });
    const Vec scale = set1(1.0f / __builtin_sqrtf((float)d));
    for (int q = 0; q < queries; q++) {
        const uint8_t* mask = row.mask ? row.mask + (long)token(q) * (row.start + row.count) : nullptr;
        weights_of(s.scores + q * s.stride, row.start + token(q) + 1, end, mask, scale);
    }
    memset(s.out, 0, queries * width * sizeof(float));
    memset(s.sums, 0, queries * sizeof(float));
    walk<K>(call, false, layer, row, groups, end, [&](int key, const K* const* values, const K* const* then) {
        const int count = end - key < BLOCK ? end - key : BLOCK, room = padded(d, 2 * W);
        // Adds them for some of a head's ``left`` queries, and says for how many.
        const auto some = [&](auto asks, auto from, auto soon, int size, int offset, int q, int left) {
            constexpr bool ASK = decltype(asks)::value;
            if (left >= GROUP) return weigh<GROUP, ASK>(s, size, q, key, count, from, soon, offset), GROUP;
            if (left >= 2) return weigh<2, ASK>(s, size, q, key, count, from, soon, offset), 2;
            return weigh<1, ASK>(s, size, q, key, count, from, soon, offset), 1;
        };
        const float* widened[BLOCK];
        for (int q = 0; q < queries;) {
            const int left = (q / each + 1) * each - q, offset = q / each * d;  // queries of this head
            if constexpr (Stored<K>::WIDENS)
                if (widens) {
                    if (left == each) {
                        widen(values, then, count, offset, d, s.block, room);
                        for (int j = 0; j < count; j++) widened[j] = s.block + j * room;
                    }
                    const auto from = (const float* const*)widened;
                    q += some(Constant<false>{}, from, from, room, 0, q, left);
                    continue;
                }
            q += left == each ? some(Constant<true>{}, values, then, d, offset, q, left)
                              : some(Constant<false>{}, values, then, d, offset, q, left);
        }
    });
    for (int q = 0; q < queries; q++) {
        const float* out = s.out + q * width;
        const Vec all = set1(s.sums[q]);
        for (int i = 0; i < width; i += 2 * W)
            Stored<K>::join({div(ld(out + i), all), div(ld(out + i + W), all)}, vector + i);
        const int at = piece.at + token(q) - piece.from;
        convert(vector, d, (Act*)model->work.attended + at * ld_out + (long)head(q) * d);
        for (int i = d; i < width; i++) vector[i] = 0;
    }
}

template <class Wt, class K>
void attention(Call* call, int layer, int thread, const Scratch& s) {
    typedef typename Wt::Act Act;
    const Shape& shape = call->model->shape;
    const int groups = shape.kv_heads, per_pass = query_tokens(shape);
    int longest = 0, passes = 0;
    for (int i = 0; i < call->piece_count; i++) {
        const int count = call->pieces[i].to - call->pieces[i].from;
        longest = count > longest ? count : longest;
        passes += (count + per_pass - 1) / per_pass;
    }
    if (longest <= per_pass) {  // whoever attends stores what is new as well
        const Range range = part(call->piece_count * groups, thread, call->threads);
        for (int task = range.from, most; task < range.to; task += most) {
            const Piece& piece = call->pieces[task / groups];
            const int first = task % groups;
            most = query_groups((piece.to - piece.from) * (shape.heads / groups));
            most = most < groups - first ? most : groups - first;
            most = most < range.to - task ? most : range.to - task;
            for (int group = first; group < first + most; group++) store<K>(call, piece, layer, group);
            attend<K, Act>(call, piece, layer, {first, first + most}, piece.from, piece.to, s);
        }
        return;
    }
    Range range = part(call->piece_count * groups, thread, call->threads);
    for (int task = range.from; task < range.to; task++)
        store<K>(call, call->pieces[task / groups], layer, task % groups);
    wait(call);
    // A later pass over a row takes longer, so passes are dealt out in turn.
    int task = 0;
    for (int i = 0; i < call->piece_count; i++) {
        const Piece& piece = call->pieces[i];
        for (int from = piece.from; from < piece.to; from += per_pass)
            for (int group = 0; group < groups; group++, task++)
                if (task % call->threads == thread) {
                    const int to = from + per_pass < piece.to ? from + per_pass : piece.to;
                    attend<K, Act>(call, piece, layer, {group, group + 1}, from, to, s);
                }
    }
}

// A row of the embedding table, which may lie in the panels of the head.
template <class Wt>
inline void embed(const Model* model, int64_t token, float* x) {
    const Shape& shape = model->shape;
    const int width = shape.width;
    if (model->embedding) {
        if (shape.hidden == BFLOAT16)
            convert((const uint16_t*)model->embedding + token * width, width, x, padded(width));
        else
            convert((const float*)model->embedding + token * width, width, x, padded(width));
        return;
    }
    const char* panel = model->head.data + token / PANEL * model->head.panel_bytes;
    const int lane = (int)(token % PANEL);
    for (int i = 0; i < width; i++) {
        if (shape.weights == BFLOAT16) {
            const uint32_t bits = (uint32_t)((const uint16_t*)panel)[(i / 2 * PANEL + lane) * 2 + i % 2] << 16;
            memcpy(x + i, &bits, 4);
        } else if (shape.weights == FLOAT32) {
            x[i] = ((const float*)panel)[i * PANEL + lane];
        } else if (shape.weights == W8A8) {
            x[i] = (float)((const int8_t*)panel)[(i / 4 * PANEL + lane) * 4 + i % 4] * model->head.scale[token];
        } else {
            x[i] = (float)((const int8_t*)panel)[i / 2 * 64 + lane / 16 * 32 + i % 2 * 16 + lane % 16] *
                   model->head.scale[token];
        }
    }
    memset(x + width, 0, (padded(width) - width) * sizeof(float));
}

// The residual stream of the tile's tokens normalised: by everybody, or each its part.
template <class Wt>
inline const typename Wt::Act* normalised(Call* call, const float* weight, int thread, const Scratch& s) {
    const Shape& shape = call->model->shape;
    const Workspace& work = call->model->work;
    const int tokens = call->tile_tokens;
    const long ldx = padded(shape.width);
    const bool own = tokens <= OWN_NORMS;
    typename Wt::Act* normed = (typename Wt::Act*)(own ? s.normed : work.normed);
    const Range mine = own ? Range{0, tokens} : part(tokens, thread, call->threads);
    for (int t = mine.from; t < mine.to; t++)
        normalise(work.x + t * ldx, weight, shape.width, shape.eps, normed + t * ldx);
    if (!own && !WHOLE<Wt>) wait(call);  // whoever narrows rows has normalised them, and waits then
    return normed;
}

// Rows of activations, with ``count`` values in each, for a product: as they are, or narrowed by everybody, or each its
// part.
template <class Wt>
inline Inputs<Wt> inputs(Call* call, const typename Wt::Act* a, long lda, int rows, int count, int thread, const Scratch& s) {
    if constexpr (WHOLE<Wt>) {
        const Workspace& work = call->model->work;
        const bool own = rows <= OWN_NORMS;
        uint8_t* to = own ? s.narrow : work.narrow;
        float* steps = own ? s.steps : work.steps;
        const Range mine = own ? Range{0, rows} : part(rows, thread, call->threads);
        const long ldn = padded(most_inputs(call->model->shape), 64);
        for (int t = mine.from; t < mine.to; t++) steps[t] = narrowed(a + t * lda, count, to + t * ldn);
        if (!own) wait(call);
        return {to, ldn, rows, steps};
    } else {
        return {a, lda, rows, nullptr};
    }
}

// The values of the tile's tokens, added up over the processes. All threads are there, and wait for it.
inline void sum_over_processes(Call* call, float* values, int thread) {
    if (!thread) call->model->sum(values, call->tile_tokens * (int64_t)padded(call->model->shape.width));
    wait(call, false);
}

// The tile's tokens through the layers, up to the final norm.
template <class Wt, class K>
void decode(Call* call, int thread, const Scratch& s) {
    typedef typename Wt::Act Act;
    Model* model = call->model;
    const Shape& shape = model->shape;
    Workspace& work = model->work;
    const int tokens = call->tile_tokens, threads = call->threads;
    const long ldx = padded(shape.width);
    Range mine = part(tokens, thread, threads);
    for (int t = mine.from; t < mine.to; t++) {
        const int64_t token = call->token[call->tile_at + t] - model->first_token;
        if (token >= 0 && token < shape.vocab)
            embed<Wt>(model, token, work.x + t * ldx);
        else  // another process has it
            memset(work.x + t * ldx, 0, ldx * sizeof(float));
    }
    wait(call);
    if (model->sum) sum_over_processes(call, work.x, thread);
    auto residual = [&](int row, int panel, const float* sums) {
        float* x = work.x + row * ldx + panel * PANEL;
        if (model->sum)
            memcpy(work.part + row * ldx + panel * PANEL, sums, PANEL * sizeof(float));
        else
            for (int i = 0; i < PANEL; i += W) st(x + i, add(ld(x + i), ld(sums + i)));
    };
    auto add_parts = [&]() {
        if (!model->sum) return;
        sum_over_processes(call, work.part, thread);
        for (long i = mine.from * ldx; i < mine.to * ldx; i += W) st(work.x + i, add(ld(work.x + i), ld(work.part + i)));
        wait(call);
    };
    const bool last = call->tile_at + tokens == call->tokens || !call->layers;
    const Matrix& behind = last ? model->head : model->layers[call->layer[0]].qkv;
    for (int number = 0; number < call->layers; number++) {
        const Layer& layer = model->layers[call->layer[number]];
        const long ld_qkv = (long)layer.qkv.panels * PANEL, ld_gated = (long)layer.gate_up.panels * (PANEL / 2);
        const Act* normed = normalised<Wt>(call, layer.input_norm, thread, s);
        product(call, thread, inputs<Wt>(call, normed, ldx, tokens, shape.width, thread, s), layer.qkv, layer.o,
                    [&](int row, int panel, const float* sums) {
                        memcpy(work.qkv + row * ld_qkv + panel * PANEL, sums, PANEL * sizeof(float));
                    });
        wait(call);
        attention<Wt, K>(call, call->layer[number], thread, s);
        wait(call);
        const int heads = shape.heads * shape.head_dim;
        product(call, thread, inputs<Wt>(call, (const Act*)work.attended, padded(heads), tokens, heads, thread, s), layer.o,
                layer.gate_up, residual);
        wait(call);
        add_parts();
        normed = normalised<Wt>(call, layer.post_norm, thread, s);
        product(call, thread, inputs<Wt>(call, normed, ldx, tokens, shape.width, thread, s), layer.gate_up, layer.down,
                    [&](int row, int panel, const float* sums) {
                        for (int i = 0; i < PANEL / 2; i += W) {
                            const Vec gate = ld(sums + i), up = ld(sums + PANEL / 2 + i);
                            const Vec silu = div(gate, add(set1(1.0f), exponential(mul(gate, set1(-1.0f)))));
                            st((Act*)work.gated + row * ld_gated + panel * (PANEL / 2) + i, mul(silu, up));
                        }
                    });
        wait(call);
        product(call, thread, inputs<Wt>(call, (const Act*)work.gated, ld_gated, tokens, shape.intermediate, thread, s),
                layer.down, number + 1 < call->layers ? model->layers[call->layer[number + 1]].qkv : behind, residual);
        wait(call);
        add_parts();
    }
}

template <class Wt>
void project(Call* call, const typename Wt::Act* a, int rows, float* logits, int thread) {
    const Model* model = call->model;
    const Matrix& head = model->head;
    const int vocab = model->shape.vocab, width = model->shape.width;
    Scratch s;
    lay_out(&s, model->work.scratch[thread], model->shape, model->work.longest);
    for (int from = 0; from < rows; from += MAX_TILE) {  // more than that is not narrowed at once
        if (from) wait(call);
        const int some = rows - from < MAX_TILE ? rows - from : MAX_TILE;
        const bool drafts = from + some == rows && call->layer && call->layers;  // a next token may come
        product(call, thread, inputs<Wt>(call, a + from * (long)padded(width), padded(width), some, width, thread, s), head,
                drafts ? model->layers[call->layer[0]].qkv : head,
                [&](int row, int panel, const float* sums) {
                    const int n = vocab - panel * PANEL < PANEL ? vocab - panel * PANEL : PANEL;
                    memcpy(logits + (long)(from + row) * vocab + panel * PANEL, sums, n * sizeof(float));
                });
    }
}

// Final hidden states of the tile's tokens, or where ``last`` is given, of those alone whose logits a draft goes by, ready
// for the product with the head. They are rounded to the type in which hidden states are handed out either way.
template <class H, class Act>
void finish(Call* call, int thread, const Scratch& s, Act* last) {
    const Model* model = call->model;
    const Shape& shape = model->shape;
    const int width = shape.width;
    const long ldx = padded(width);
    H* normed = (H*)s.normed;
    if (last) {
        for (int i = 0; i < call->piece_count; i++) {
            const Piece& piece = call->pieces[i];
            const int behind = call->kept_at[piece.row + 1] - call->row[piece.row].count;
            for (int n = piece.from; n < piece.to; n++) {
                const int at = behind + n;
                if (at < call->kept_at[piece.row] || at % call->threads != thread) continue;
                normalise(model->work.x + (piece.at + n - piece.from) * ldx, model->norm, width, shape.eps, normed);
                convert(normed, width, last + at * ldx, (int)ldx);
            }
        }
        return;
    }
    const Range mine = part(call->tile_tokens, thread, call->threads);
    for (int t = mine.from; t < mine.to; t++) {
        normalise(model->work.x + t * ldx, model->norm, width, shape.eps, normed);
        memcpy((H*)call->hidden + (long)(call->tile_at + t) * width, normed, width * sizeof(H));
    }
}

template <class Wt, class K, class H>
void tiles(Call* call, int thread, typename Wt::Act* last) {
    const Model* model = call->model;
    Scratch s;
    lay_out(&s, model->work.scratch[thread], model->shape, model->work.longest);
    for (;;) {
        decode<Wt, K>(call, thread, s);
        finish<H>(call, thread, s, last);
        if (call->tile_at + call->tile_tokens == call->tokens) return;
        wait(call);
        if (!thread) next_tile(call);
        wait(call);
    }
}

// The lowest id of the largest logit.
inline int64_t best(const float* logits, int vocab) {
    Vec most = set1(-__builtin_inff());
    float peak = -__builtin_inff();
    int v = 0;
    for (; v + W <= vocab; v += W) most = larger(most, ld(logits + v));
    for (int rest = v; rest < vocab; rest++) peak = logits[rest] > peak ? logits[rest] : peak;
    const float lanes = largest(most);
    peak = lanes > peak ? lanes : peak;
    const Vec wanted = set1(peak);
    for (v = 0; v + W <= vocab; v += W)
        if (const unsigned same = equal(ld(logits + v), wanted)) return v + __builtin_ctz(same);
    for (; v < vocab; v++)
        if (logits[v] == peak) return v;
    return 0;
}

// Floats in ascending order are these numbers in ascending order.
inline int32_t rank_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float of_rank(int32_t rank) {
    const int32_t bits = rank ^ ((rank >> 31) & 0x7fffffff);
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// The least x such that what lies above it adds up to less than ``limit``: of ``mass``, or of ones where that is null.
inline float least_kept(const float* logits, const float* mass, int room, float peak, float limit) {
    int64_t low = rank_of(-__builtin_inff()), high = rank_of(peak);
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const Vec cut = set1(of_rank((int32_t)middle));
        Vec above = zero();
        for (int v = 0; v < room; v += W)
            above = add(above, where_above(ld(logits + v), cut, mass ? ld(mass + v) : set1(1.0f)));
        if (sum(above) < limit)
            high = middle;
        else
            low = middle + 1;
    }
    return of_rank((int32_t)high);
}

// What ``how`` keeps of logits (fly/sampling.py: ProcessedDistribution): the largest, the least that is kept, the mass of those.
struct Kept {
    float peak, least, total;
};

// ``spread`` [2, room] then holds the logits and the mass of each that is kept, zeros for the others; counts of tokens
// are exact in floats up to 2^24.
inline Kept keep(const Sampling& how, const float* given, int vocab, float* spread) {
    const int room = padded(vocab);
    float *logits = spread, *mass = spread + room;
    memcpy(logits, given, vocab * sizeof(float));
    for (int v = vocab; v < room; v++) logits[v] = -__builtin_inff();
    Vec most = set1(-__builtin_inff());
    for (int v = 0; v < room; v += W) most = larger(most, ld(logits + v));
    const float peak = largest(most);
    float least = -__builtin_inff();
    if (how.top_k) least = least_kept(logits, nullptr, room, peak, (float)(how.top_k < vocab ? how.top_k : vocab));
    Vec all = zero();
    const Vec top = set1(-peak), temperature = set1(how.temperature), cut = set1(least);
    for (int v = 0; v < room; v += W) {
        const Vec logit = ld(logits + v);
        const Vec kept = where_from(logit, cut, exponential(div(add(logit, top), temperature)));
        st(mass + v, kept);
        all = add(all, kept);
    }
    float total = sum(all);
    float kept_from = least;
    if (how.top_p < 1) {
        const float nucleus = least_kept(logits, mass, room, peak, how.top_p * total);
        kept_from = nucleus > kept_from ? nucleus : kept_from;
    }
    if (peak + how.floor > kept_from) kept_from = peak + how.floor;
    if (kept_from > least) {
        all = zero();
        for (int v = 0; v < room; v += W) {
            const Vec kept = where_from(ld(logits + v), set1(kept_from), ld(mass + v));
            st(mass + v, kept);
            all = add(all, kept);
        }
        total = sum(all);
    }
    return {peak, kept_from, total};
}

// The same of ``rows`` times ``each`` positions, each row by its own ``how``; ``total`` as its logarithm.
void kept(const float* logits, int rows, int each, int vocab, const Sampling* how, float* spread, float* peak,
          float* least, float* total) {
    for (int at = 0; at < rows * each; at++) {
        Sampling mine = how[at / each];
        if (!mine.temperature) mine.temperature = 1;  // nobody will look, but rows beside it must not notice
        const Kept found = keep(mine, logits + (long)at * vocab, vocab, spread);
        peak[at] = found.peak, least[at] = found.least, total[at] = __builtin_logf(found.total);
    }
}

// How sure a distribution is: its largest probability, and its entropy in nats.
struct Surety {
    float peak, entropy;
};

// Of what ``keep`` left in ``spread``.
inline Surety surety(const Kept& kept, float temperature, int vocab, const float* spread) {
    const int room = padded(vocab);
    const Vec top = set1(-kept.peak), least = set1(-1e30f);  // where nothing is kept, the product is to be 0
    Vec all = zero();
    for (int v = 0; v < room; v += W) all = fma(ld(spread + room + v), larger(add(ld(spread + v), top), least), all);
    return {1 / kept.total, __builtin_logf(kept.total) - sum(all) / (temperature * kept.total)};
}

// A token drawn from a distribution [V] that need not sum to 1 (fly/sampling.py: draw); -1 where that has no mass.
inline int64_t pick(const float* distribution, int vocab, float uniform) {
    double whole = 0, so_far = 0;
    for (int v = 0; v < vocab; v++) whole += distribution[v];
    const double wanted = (double)uniform * whole;
    for (int v = 0; v < vocab && whole > 0; v++) {
        so_far += distribution[v];
        if (so_far > wanted) return v;
    }
    return -1;
}

// The distribution that ``how`` makes of logits, which is then in the second half of ``spread`` [2, V padded].
inline float* distribution_of(const Sampling& how, const float* given, int vocab, float* spread, Surety* sure = nullptr) {
    const int room = padded(vocab);
    const Kept kept = keep(how, given, vocab, spread);
    if (sure) *sure = surety(kept, how.temperature, vocab, spread);
    const Vec total = set1(kept.total);
    float* mass = spread + room;
    for (int v = 0; v < room; v += W) st(mass + v, div(ld(mass + v), total));
    return mass;
}

// The same into ``distribution`` [V], and a token drawn from it.
inline int64_t sample(const Sampling& how, const float* given, int vocab, float uniform, float* distribution, float* spread,
                      Surety* sure) {
    memcpy(distribution, distribution_of(how, given, vocab, spread, sure), vocab * sizeof(float));
    const int64_t token = pick(distribution, vocab, uniform);
    return token < 0 ? 0 : token;
}

// Whether the exact rule keeps each drafted token by its coin (fly/policies/base.py: exact_accept_probs), up to the first
// that it does not keep, or of ``all``. ``distributions`` [count, V] is what they were drawn from; null is a deterministic draft.
// Returns the number of that first token, or ``count``; ``keeps`` [count] or null tells of each.
int accepts(const float* logits, int vocab, const Sampling* how, const int64_t* drafted, int count, const float* distributions,
            const float* coins, bool all, float* spread, uint8_t* keeps) {
    int first = count;
    for (int j = 0; j < count && (all || first == count); j++, logits += vocab) {
        const int64_t token = drafted[j];
        bool kept;
        if (how->temperature > 0) {
            constexpr float least = 1.17549435e-38f;
            const float target = distribution_of(*how, logits, vocab, spread)[token];
            const float draft = distributions ? distributions[(long)j * vocab + token] : 1;
            kept = coins[j] < target / (draft > least ? draft : least);
        } else {
            kept = best(logits, vocab) == token;
        }
        if (keeps) keeps[j] = kept;
        if (!kept && first == count) first = j;
    }
    return first;
}

// The token behind those that stand: drawn from the target's distribution or, if a drafted one was ``rejected`` there (else -1),
// from what is left of it without the draft's ``distribution`` [V] (null: that one token).
int64_t follow(const float* logits, int vocab, const Sampling* how, int64_t rejected, const float* distribution, float uniform,
               float* spread) {
    if (!(how->temperature > 0)) return best(logits, vocab);
    float *target = distribution_of(*how, logits, vocab, spread), *left = spread;
    if (rejected >= 0) {
        for (int v = 0; v < vocab; v++) {
            const float rest = target[v] - (distribution ? distribution[v] : v == rejected);
            left[v] = rest > 0 ? rest : 0;
        }
        const int64_t token = pick(left, vocab, uniform);
        if (token >= 0) return token;  // else the distributions are equal: a rejection is a rounding matter, and the distribution is right
    }
    const int64_t token = pick(target, vocab, uniform);
    return token < 0 ? 0 : token;
}

// The next token of row ``b``, by the logits of the one before; -1 where the drafter is not sure enough of any.
inline int64_t next_token(Call* call, int b, const float* logits) {
    const int vocab = call->model->shape.vocab;
    const bool asks = call->sure.confidence > 0 || call->sure.entropy < __builtin_inff();
    float* spread = call->model->work.spread;
    Surety sure;
    int64_t token;
    if (call->sampling && call->sampling[b].temperature > 0) {
        const long at = (long)b * call->most + call->drafted_count[b];
        token = sample(call->sampling[b], logits, vocab, call->uniform[at], call->distributions + at * vocab, spread,
                       asks ? &sure : nullptr);
    } else {
        token = best(logits, vocab);
        if (asks) {
            constexpr Sampling raw = {1, 1, -__builtin_inff(), 0};
            sure = surety(keep(raw, logits, vocab, spread), 1, vocab, spread);
        }
        if (call->sampling) {
            float* distribution = call->distributions + ((long)b * call->most + call->drafted_count[b]) * vocab;
            memset(distribution, 0, vocab * sizeof(float));
            distribution[token] = 1;
        }
    }
    return asks && !(sure.peak >= call->sure.confidence && sure.entropy <= call->sure.entropy) ? -1 : token;
}

// Nanoseconds that a forward of so many tokens is thought to take: somewhat more than the most that fewer were seen to.
inline float time_of(const Lookup& lookup, int tokens) {
    int seen = tokens < TIMES ? tokens : TIMES;
    while (seen > 1 && !lookup.time[seen - 1]) seen--;
    const float time = lookup.time[seen - 1] ? lookup.time[seen - 1] : 1;
    return tokens > TIMES ? time * tokens / TIMES : time * (1 + 0.1f * (tokens - seen));
}

// A forward of so many tokens took so long. What lost the processor meanwhile counts for twice what was thought at most;
// what was avoided for what it took, by chance or at another length of text, is tried again at times.
inline void learn_time(Lookup* lookup, int tokens, float nanoseconds) {
    if (lookup->forwards++ % 1024 == 0) memset(lookup->time, 0, sizeof(lookup->time));
    const float most = 2 * time_of(*lookup, tokens);
    if (nanoseconds > most && most > 1000) nanoseconds = most;  // nothing is known where it is less
    if (tokens > TIMES) nanoseconds *= (float)TIMES / tokens;
    float& time = lookup->time[(tokens < TIMES ? tokens : TIMES) - 1];
    time += time ? 0.25f * (nanoseconds - time) : nanoseconds;
}

// Find the longest n-gram that ends a text of ``length`` tokens and occurred before, at its latest place, and copy
// ``most`` tokens that followed (or followed these) behind the text. Returns how many tokens before are the same.
int look_up(const Lookup& lookup, int32_t* text, int length, int most) {
    constexpr int SOME = 32;
    const int32_t last = text[length - 1];
    int matched = 0, follows = 0;
    for (int to = length - 1; to > 0 && matched < lookup.longest; to -= SOME) {
        const int from = to > SOME ? to - SOME : 0;
        if (to >= SOME) {  // most of a text is passed over at the speed of vectors
            int any = 0;
            for (int i = 0; i < SOME; i++) any |= text[from + i] == last;
            if (!any) continue;
        }
        for (int end = to - 1; end >= from && matched < lookup.longest; end--) {
            if (text[end] != last) continue;
            int n = 1;
            while (n < lookup.longest && n <= end && text[end - n] == text[length - 1 - n]) n++;
            if (n > matched && n >= lookup.shortest) matched = n, follows = end + 1;
        }
    }
    if (!matched) return 0;
    for (int i = 0; i < most; i++) text[length + i] = text[follows + i];
    while (matched < MATCHES && matched < follows && text[follows - 1 - matched] == text[length - 1 - matched]) matched++;
    return matched;
}

inline float& share_of(Lookup* lookup, int matched, int copied) {
    const int at = matched + copied - 1;
    return lookup->share[at < MATCHES ? at : MATCHES - 1];
}

// The next forward: of each live row the tokens not stored, and as many copies behind them as make for the most tokens
// drafted a second: (1 + a + a·a + ...) over what the forward takes, for copies that stand with a chance of a.
inline void pack(Call* call) {
    Lookup* lookup = call->lookup;
    int tokens = 0, kept = 0, room = MAX_COPIES;
    float expected = call->live_rows;
    for (int i = 0; i < call->live_rows; i++) tokens += call->live[i].count;
    int forward = tokens;  // tokens of the forward, as far as it is decided
    tokens = 0;
    for (int i = 0; i < call->live_rows; i++) {
        const int b = call->live_row[i];
        Row& row = call->live[i];
        int32_t* text = call->text[b];
        int copies = 0;
        if (lookup) {
            int most = call->limit[b] - call->drafted_count[b] - 1;
            most = most < lookup->most ? most : lookup->most;
            // at least one, for what is seen of it
            const int matched = call->matched[i] = look_up(*lookup, text, row.start + row.count, most > 0 ? most : 1);
            most = !matched ? 0 : most < room ? most : room;
            float stands = 1, reached = expected, best = expected / time_of(*lookup, forward);
            for (int n = 1; n <= most; n++) {
                stands *= share_of(lookup, matched, n - 1);
                reached += stands;
                const float rate = reached / time_of(*lookup, forward + n);
                if (rate > best) best = rate, copies = n, expected = reached;
            }
            forward += copies, room -= copies;
        }
        row.count += copies;
        for (int n = 0; n < row.count; n++, tokens++) {
            call->live_token[tokens] = text[row.start + n];
            call->live_position[tokens] = row.start + n;
        }
        call->kept_at[i] = kept;
        kept += copies + 1;
    }
    call->kept_at[call->live_rows] = kept;
    call->rows = call->live_rows, call->tokens = tokens;
    call->token = call->live_token, call->position = call->live_position;
    if (tokens) first_tile(call);
}

// What each live row drafts: the next token, and as long as that is the one copied, the one behind it.
inline void advance(Call* call) {
    const Model* model = call->model;
    int live = 0;
    for (int i = 0; i < call->live_rows; i++) {
        const int b = call->live_row[i], copies = call->kept_at[i + 1] - call->kept_at[i] - 1;
        const float* logits = model->work.logits + (long)call->kept_at[i] * model->shape.vocab;
        Row row = call->live[i];
        int32_t* next = call->text[b] + row.start + row.count - copies;
        row.start += row.count - copies - 1, row.count = 1;
        const int matched = call->lookup ? call->matched[i] : 0;
        bool ends = false, same = true;
        for (int n = 0; same && !ends && n <= copies; n++, next++, logits += model->shape.vocab) {
            const int64_t token = next_token(call, b, logits);
            if ((ends = token < 0)) break;
            same = *next == token;
            if (matched && (n < copies || !copies)) {
                float& share = share_of(call->lookup, matched, n);
                share += 0.05f * (same - share);
            }
            *next = (int32_t)token;
            call->drafted[(long)b * call->most + call->drafted_count[b]++] = token;
            row.start++;
            ends = call->drafted_count[b] == call->limit[b];
            for (int at = call->stop_at[b]; at < call->stop_at[b + 1]; at++) ends |= call->stop[at] == token;
        }
        if (ends) continue;
        call->live[live] = row;
        call->live_row[live] = b;
        live++;
    }
    call->live_rows = live;
    pack(call);
}

template <class Wt, class K, class H>
void draft(Call* call, int thread) {
    typename Wt::Act* last = (typename Wt::Act*)call->model->work.last;
    if (!thread) pack(call);
    wait(call);
    do {
        const int64_t begin = nanoseconds();
        tiles<Wt, K, H>(call, thread, last);
        wait(call);
        project<Wt>(call, last, call->kept_at[call->live_rows], call->model->work.logits, thread);
        wait(call);
        if (!thread) {
            if (call->lookup) learn_time(call->lookup, call->tokens, (float)(nanoseconds() - begin));
            advance(call);
        }
        wait(call, false);
    } while (call->live_rows);
}

template <class Wt, class H>
void project_all(Call* call, int thread) {
    typedef typename Wt::Act Act;
    const Model* model = call->model;
    const int width = model->shape.width;
    const long ldx = padded(width);
    Act* normed = (Act*)model->work.normed;
    const int vocab = model->shape.vocab;
    for (int at = 0; at < call->kept_count; at += MAX_TILE) {
        const int rows = call->kept_count - at < MAX_TILE ? call->kept_count - at : MAX_TILE;
        const Range mine = part(rows, thread, call->threads);
        for (int t = mine.from; t < mine.to; t++) {
            const long from = call->kept ? call->kept[at + t] : at + t;
            convert((const H*)call->hidden + from * width, width, normed + t * ldx, (int)ldx);
        }
        wait(call);
        project<Wt>(call, normed, rows, call->logits + (long)at * vocab, thread);
        wait(call);
        for (int t = mine.from; call->choice && t < mine.to; t++)
            call->choice[at + t] = (int32_t)best(call->logits + (long)(at + t) * vocab, vocab);
    }
}

// The ``n`` largest logits (-inf where there are fewer), largest first, and ln of the sum of exp over all of them.
void top(const float* logits, int vocab, int n, float* found) {
    for (int i = 0; i < n; i++) found[i] = -__builtin_inff();
    auto insert = [&](float x) {
        int at = n - 1;
        for (; at > 0 && found[at - 1] < x; at--) found[at] = found[at - 1];
        found[at] = x;
    };
    alignas(64) float rest[W];
    const int whole = vocab / W * W;
    for (int i = 0; i < W; i++) rest[i] = whole + i < vocab ? logits[whole + i] : -__builtin_inff();
    Vec least = set1(found[n - 1]);
    for (int v = 0; v <= whole; v += W) {
        const float* from = v < whole ? logits + v : rest;
        const Vec values = ld(from);
        if (equal(larger(values, least), least) == (1u << W) - 1) continue;
        for (int i = 0; i < W; i++)
            if (from[i] > found[n - 1]) insert(from[i]);
        least = set1(found[n - 1]);
    }
    const Vec peak = set1(-found[0]);
    Vec all = zero();
    for (int v = 0; v <= whole; v += W) all = add(all, exponential(add(ld(v < whole ? logits + v : rest), peak)));
    found[n] = found[0] + __builtin_logf(sum(all));
}

// Final hidden states of all tokens, then the logits of those that are kept.
template <class Wt, class K, class H>
void score(Call* call, int thread) {
    tiles<Wt, K, H>(call, thread, nullptr);
    wait(call);
    project_all<Wt, H>(call, thread);
}

// From the types of a call to the code for them.
enum Job { FORWARD, DRAFT, LOGITS, SCORE };

template <class Wt, class H, class K>
void dispatch(Job job, Call* call, int thread) {
    if (job == FORWARD) return tiles<Wt, K, H>(call, thread, nullptr);
    if (job == DRAFT) return draft<Wt, K, H>(call, thread);
    if (job == SCORE) return score<Wt, K, H>(call, thread);
    return project_all<Wt, H>(call, thread);
}

template <class Wt, class H>
void dispatch(Job job, Call* call, int thread) {
    if (call->cache.type == BFLOAT16) return dispatch<Wt, H, uint16_t>(job, call, thread);
    return dispatch<Wt, H, float>(job, call, thread);
}

void dispatch(Job job, Call* call, int thread) {
    const Shape& shape = call->model->shape;
    if (shape.weights == BFLOAT16) return dispatch<BFloat16, uint16_t>(job, call, thread);
    if (shape.weights == FLOAT32) return dispatch<Float32, float>(job, call, thread);
    if (shape.weights == INT8)
        return shape.hidden == BFLOAT16 ? dispatch<Int8, uint16_t>(job, call, thread) : dispatch<Int8, float>(job, call, thread);
    if (shape.hidden == BFLOAT16) return dispatch<Whole8, uint16_t>(job, call, thread);
    return dispatch<Whole8, float>(job, call, thread);
}

void forward(Call* call, int thread) { dispatch(FORWARD, call, thread); }
void draft(Call* call, int thread) { dispatch(DRAFT, call, thread); }
void logits(Call* call, int thread) { dispatch(LOGITS, call, thread); }
void score(Call* call, int thread) { dispatch(SCORE, call, thread); }

int activation_bytes(int weights) {
    const size_t bytes[] = {sizeof(Float32::Act), sizeof(BFloat16::Act), sizeof(Int8::Act), sizeof(Whole8::Act)};  // Type
    return (int)bytes[weights];
}
