// Attention over the paged cache. ``attention`` (at the end of this file) stores the new keys and values; then
// ``attend`` computes scores, weights and weighted sums of values for all queries that share a pass. Knows nothing of
// matrices, nor of the rest of a layer.
//
// A token's sum runs over all stored tokens in ascending order. Tokens that it does not see add exact zeros.

constexpr int QUERIES = 48;             // queries whose scores are held at once
constexpr int OWN_NORMS = 4;            // up to so many tokens, every thread normalises all of them, which saves a barrier
constexpr int BLOCK = 2 * W;            // stored tokens that are scored at once
constexpr int GROUP = 6;                // the most queries whose sums, two vectors of each or more, are in registers at once
constexpr int TURNED = 6;               // from so many queries of a head on, it pays to transpose its keys
constexpr int SHARED = 12;              // with more queries of a head, it pays to read its values once for all of them

// How many new tokens share a pass over one key/value head, and how many key/value heads share one.
inline int query_tokens(const Shape& shape) { return max_of(QUERIES / (shape.heads / shape.kv_heads), 1); }
inline int query_groups(int queries) { return max_of(QUERIES / queries, 1); }

// A thread's own buffers.
struct Scratch {
    long stride;                         // of scores, from one query to the next: never a power of two, lest caches hold few
    float *scores, *out, *sums, *block;  // block: transposed keys, or values that were read once
    char* queries;
    void* normed;
    uint8_t* narrow;
    float* steps;
    Beside beside;

    Scratch(Dealer& from, const Shape& shape, int longest) : stride(padded(longest, 128) + BLOCK) {
        const int queries_of = max_of(shape.heads / shape.kv_heads, QUERIES), width = padded(shape.head_dim);
        scores = from.take<float>(queries_of, stride);
        out = from.take<float>(queries_of, width);
        sums = from.take<float>(padded(queries_of, W));
        block = from.take<float>(BLOCK, width);
        queries = from.take<char>(queries_of, width, 4);
        normed = from.take<float>(OWN_NORMS, padded(shape.width));
        narrow = from.take<uint8_t>(narrows(shape) ? OWN_NORMS : 0, padded(most_inputs(shape), 64));
        steps = from.take<float>(OWN_NORMS, steps_of(shape));
        const int blocks = W == 16 && shape.weights == W8A8 ? BLOCKS_BESIDE : 0;
        beside.a = from.take<int8_t>(blocks * BESIDE, padded(most_inputs(shape), 64));
        beside.excess = from.take<int32_t>(blocks * BESIDE);
    }
};

void lay_scratch(Dealer& from, const Shape* shape, int longest) { Scratch(from, *shape, longest); }

// A thread's own buffers, in the memory that ``make_room`` has taken for them.
inline Scratch scratch_of(const Model* model, int thread) {
    const Block& own = model->work.scratch[thread];
    Dealer from = {own.memory, own.bytes, 0, false};
    return Scratch(from, model->shape, model->work.longest);
}

// Normalises one head's vector, if the layer has a norm for it, and rotates it.
inline void rotate(const Model* model, const Layer& layer, Norm which, const float* from, int64_t position, float* to) {
    const int d = model->shape.head_dim, half = d / 2;
    const long at = (layer.rope * (long)model->shape.positions + position) * half;
    const float *cos = model->cos + at, *sin = model->sin + at, *norm = layer.norm[which];
    alignas(64) float head[1024], normed[1024];
    if (norm) {
        memcpy(head, from, d * sizeof(float));
        memset(head + d, 0, (padded(d) - d) * sizeof(float));
        normalise(head, norm, d, model->shape.eps, normed);
        from = normed;
    }
    for (int i = 0; i < half; i++) {
        const float a = from[i], b = from[i + half];
        to[i] = a * cos[i] - b * sin[i];
        to[i + half] = b * cos[i] + a * sin[i];
    }
}

// The slot of head ``group``'s key (or value) of a token in page ``number`` of a row.
template <class K>
inline K* slot(const Call* call, void* base, int layer, const Row& row, int number, int within, int group) {
    const Shape& shape = call->model->shape;
    const long at = (long)row.table[number] * call->page + within;
    return (K*)base + layer * call->layer_stride + (at * shape.kv_heads + group) * shape.head_dim;
}

// Finds where a block's tokens are cached, each at head ``group``. Entries after the end repeat the last slot.
template <class K>
inline void locate(const Call* call, void* base, int layer, const Row& row, int group, int from, int end,
                   const K* found[BLOCK]) {
    const int page = call->page;
    const long apart = (long)call->model->shape.kv_heads * call->model->shape.head_dim;  // of two tokens of a page
    int number = from / page, within = from % page;  // a division takes as long as a token's dot product
    const K* at = slot<K>(call, base, layer, row, number, within, group);
    for (int i = 0; i < BLOCK; i++) {
        found[i] = at;
        if (from + i + 1 >= end) continue;
        if (++within < page)
            at += apart;
        else
            at = slot<K>(call, base, layer, row, ++number, within = 0, group);
    }
}

// Fetches the cache lines of 2·W numbers of keys (or values) from ``p`` on, each line once. They go to the second-level
// cache, because the first level waits for too few lines at once to keep memory busy.
template <class K>
ALWAYS_INLINE void fetch_row(const K* p) {
    constexpr int BYTES = 2 * W * (int)sizeof(K);
    if (BYTES < 64 && (uintptr_t)p % 64 >= BYTES) return;
    UNROLL for (int i = 0; i < BYTES; i += 64) fetch((const char*)p + i);
}

// The same from value ``from`` on of slot ``i`` in ``then``. Null: nothing is fetched.
template <class K>
ALWAYS_INLINE void fetch_row(const K* const* then, int i, long from) { fetch_row(then[i] + from); }
ALWAYS_INLINE void fetch_row(decltype(nullptr), int, long) {}

// Walks over the keys (or values) of tokens ``begin`` to ``end``, block by block: calls ``use(first, slots, then)``
// with the slots of the block's tokens, in which all of ``groups`` lie side by side, and the slots of a later block, to
// be fetched meanwhile. After the last keys it fetches the first values, for the walk over values that follows.
template <class K, class Use>
inline void walk(const Call* call, bool keys, int layer, const Row& row, Range groups, int begin, int end, Use use) {
    constexpr int RING = 5;
    const K* ring[RING][BLOCK];
    const int d = call->model->shape.head_dim, count = groups.to - groups.from;
    const int blocks = (end - begin + BLOCK - 1) / BLOCK;
    const int ahead = count >= 4 ? 1 : 64 / BLOCK;  // blocks
    auto find = [&](int block) {
        const bool here = block < blocks;
        const int other = keys && block - blocks < blocks ? block - blocks : blocks - 1;
        locate(call, here && keys ? call->keys : call->values, layer, row, groups.from,
               begin + (here ? block : other) * BLOCK, end, ring[block % RING]);
    };
    for (int block = 0; block < ahead; block++) {
        find(block);
        if (keys)
            for (const K* at : ring[block])
                for (int i = 0; i < count * d; i += 2 * W) fetch_row(at + i);
    }
    for (int block = 0; block < blocks; block++) {
        find(block + ahead);
        use(begin + block * BLOCK, ring[block % RING], ring[(block + ahead) % RING]);
    }
}

// Stores keys and values of a piece's new tokens, for one key/value head.
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
        rotate(model, model->layers[layer], KEY, key, call->position[call->tile_at + at], rotated);
        const int page = (row.start + n) / call->page, within = (row.start + n) % call->page;
        convert(rotated, d, slot<K>(call, call->keys, layer, row, page, within, group));
        convert(key + (long)shape.kv_heads * d, d, slot<K>(call, call->values, layer, row, page, within, group));
    }
}

// Queries and their scores. Rows of queries are ``width`` values apart, rows of scores ``stride``.
template <class K>
struct Asking {
    const typename Stored<K>::Query* query;
    long width;
    float* out;
    long stride;
};

// Scores of NQ queries, each with the same W / NQ keys, of the head that begins ``offset[i]`` values on. It computes W
// products at a time; each is summed lane by lane over the head's width, then by one tree over the lanes. Fetches the
// keys at ``then`` (or null), once for each head.
template <class K, int NQ, class Then>
inline void score(Asking<K> who, const int offset[NQ], const K* const* key, Then then, int d) {
    constexpr int NK = W / NQ;
    Vec acc[W];
    UNROLL for (int i = 0; i < W; i++) acc[i] = zero();
    int at = 0;
    const auto step = [&](auto... left) __attribute__((always_inline)) {  // of 2·W values, or as many as are left
        UNROLL for (int i = 0; i < W; i++) {
            const long from = offset[i / NK] + at;
            if (i < NK || offset[i / NK] != offset[i / NK - 1]) fetch_row(then, i % NK, from);
            acc[i] = Stored<K>::dot(who.query + i / NK * who.width + at, acc[i], key[i % NK] + from, left...);
        }
    };
    for (; at + 2 * W <= d; at += 2 * W) step();
    if (at < d) step(d - at);
    const Vec all = sums(acc);
    if constexpr (NQ == 1)
        st(who.out, all);
    else
        fours(all, who.out, who.stride);
}

// Adds up each query's weights over ``count`` tokens, in ascending order, so that zeros between them (tokens of other
// branches) change nothing. There is room for whole vectors of weights, and zeros after the last one.
inline void sum_weights(const Scratch& s, int queries, int from, int count) {
    for (int q = 0; q < queries; q += W) {
        Vec total = zero();
        for (int j = 0; j < count; j += W) {
            Vec weights[W];
            UNROLL for (int i = 0; i < W; i++) weights[i] = ld(s.scores + min_of(q + i, queries - 1) * s.stride + from + j);
            transpose(weights);
            UNROLL for (int i = 0; i < W; i++) total += weights[i];
        }
        st(s.sums + q, total);
    }
}

// Reads vectors that ``take_once`` stored, where ``Stored<K>`` would read values of TOKENS tokens.
template <class K>
struct Taken : Stored<K> {
    typedef float Value;
    template <class... Left>
    static inline Pair taken(const float* const* value, long from, Left...) { return pair(*value + from); }
};

// Reads the values of up to BLOCK tokens, for the head that begins ``offset`` numbers on, and stores them at ``to``: TOKENS
// tokens make one row of ``room`` numbers. Prefetches the values at ``then``, which are read next.
template <class K>
inline void take_once(const K* const* value, const K* const* then, int count, int offset, int d, float* to, int room) {
    for (int j = 0; j < count; j += Stored<K>::TOKENS, to += room)
        for (int at = 0; at < d; at += 2 * W) {
            const long from = offset + at;
            UNROLL for (int token = 0; token < Stored<K>::TOKENS; token++) fetch_row(then, j + token, from);
            const Pair x = at + 2 * W <= d ? Stored<K>::taken(value + j, from) : Stored<K>::taken(value + j, from, d - at);
            st(to + at, x.first), st(to + at + W, x.second);
        }
}

// Adds up ``count`` tokens' values, NV vectors of each, weighted for NQ queries, as ``S`` reads them. If NV is 2, there may
// be only ``rest`` numbers left. Fetches the values at ``then`` (or null).
template <class S, int NQ, int NV, class Then>
ALWAYS_INLINE void weigh(float* out, long width, const float* weights, long stride, int count,
                         const typename S::Value* const* value, Then then, long from, int rest) {
    Vec acc[NQ][NV];
    UNROLL for (int i = 0; i < NQ; i++)
        UNROLL for (int v = 0; v < NV; v++) acc[i][v] = ld(out + i * width + v * W);
    for (int j = 0; j < count; j += S::TOKENS) {
        Pair x[NV / 2];
        UNROLL for (int v = 0; v < NV / 2; v++) {
            const long at = from + v * 2 * W;
            UNROLL for (int token = 0; token < S::TOKENS; token++) fetch_row(then, j + token, at);
            x[v] = NV == 2 && rest < 2 * W ? S::taken(value + j, at, rest) : S::taken(value + j, at);
        }
        UNROLL for (int i = 0; i < NQ; i++) {
            const Vec weight = S::spread_weight(weights + i * stride, j);
            UNROLL for (int v = 0; v < NV / 2; v++) {
                acc[i][2 * v] = S::times(weight, x[v].first, acc[i][2 * v]);
                acc[i][2 * v + 1] = S::times(weight, x[v].second, acc[i][2 * v + 1]);
            }
        }
    }
    UNROLL for (int i = 0; i < NQ; i++)
        UNROLL for (int v = 0; v < NV; v++) st(out + i * width + v * W, acc[i][v]);
}

// The same for the whole width of a head, with ``weights`` of the first query. It is not inlined, because its sums need all
// registers.
template <class S, int NQ, class Then>
NOINLINE void weigh(const Scratch& s, int d, int query, const float* weights, int count,
                    const typename S::Value* const* value, Then then, int offset) {
    constexpr int NV = W == 8 && NQ > 2 ? 2 : 4;
    const long width = padded(d), stride = s.stride;
    float* out = s.out + query * width;
    int at = 0;
    for (; at + NV * W <= d; at += NV * W)
        weigh<S, NQ, NV>(out + at, width, weights, stride, count, value, then, offset + at, NV * W);
    for (; at < d; at += 2 * W) weigh<S, NQ, 2>(out + at, width, weights, stride, count, value, then, offset + at, d - at);
}

// If products take two tokens at a time, this rounds the weights of ``count`` tokens from ``from`` on to bfloat16, in place.
template <class K>
inline void narrow_weights(const Scratch& s, int queries, int from, int count) {
    if constexpr (Stored<K>::TOKENS == 2)
        for (int q = 0; q < queries; q++) {
            float* weights = s.scores + q * s.stride + from;
            for (int j = 0; j < count; j += W) Stored<K>::narrow(ld(weights + j), weights + j / 2);
        }
}

// Transposes a block's keys of the head that begins ``offset`` values on. For each 2·W values it writes lane after lane,
// each with all keys side by side.
template <class K>
inline void turn(const K* const* key, const K* const* then, int offset, int d, float* to) {
    constexpr int PART = W * 4 / (int)sizeof(K);  // values of a key in a vector
    for (int at = 0; at < d; at += 2 * W, to += W * Stored<K>::DEEP * BLOCK)
        for (int half = 0; half < 2 * W / PART; half++)
            for (int first = 0; first < BLOCK; first += W) {
                const int from = at + half * PART, left = d - from;
                Vec rows[W];
                if (!half) UNROLL for (int j = 0; j < W; j++) fetch_row(then[first + j] + offset + at);
                if (left >= PART)
                    UNROLL for (int j = 0; j < W; j++) rows[j] = ld((const float*)(key[first + j] + offset + from));
                else
                    for (int j = 0; j < W; j++) {
                        K some[PART] = {};
                        if (left > 0) memcpy(some, key[first + j] + offset + from, left * sizeof(K));
                        rows[j] = ld((const float*)some);
                    }
                transpose(rows);
                UNROLL for (int lane = 0; lane < W; lane++)
                    Stored<K>::lay(rows[lane], half, to + lane * Stored<K>::DEEP * BLOCK + first, BLOCK);
            }
}

// Sums of NQ queries with a block's keys.
template <int NQ>
struct Several {
    Vec of[NQ][2];
};

// Adds up the products with transposed keys over COUNT lanes, in the order of ``sums``. A head has ``steps`` times 2·W
// values.
template <class K, int NQ, int COUNT = W, int AT = 0>
ALWAYS_INLINE Several<NQ> over_lanes(const Asking<K>& who, const float* keys, int steps) {
    Several<NQ> all;
    if constexpr (COUNT > 1) {
        const auto some = over_lanes<K, NQ, COUNT / 2, AT>(who, keys, steps);
        const auto rest = over_lanes<K, NQ, COUNT / 2, AT + COUNT / 2>(who, keys, steps);
        UNROLL for (int i = 0; i < NQ; i++)
            UNROLL for (int j = 0; j < 2; j++) all.of[i][j] = some.of[i][j] + rest.of[i][j];
    } else {
        UNROLL for (int i = 0; i < NQ; i++)
            UNROLL for (int j = 0; j < 2; j++) all.of[i][j] = zero();
        constexpr int DEEP = Stored<K>::DEEP, LANE = LANES[AT];
        const auto* query = who.query;
        const float* mine = keys + LANE * DEEP * BLOCK;
        for (int step = 0; step < steps; step++, query += 2 * W, mine += W * DEEP * BLOCK)
            UNROLL for (int deep = 0; deep < DEEP; deep++) {
                const Vec key[2] = {ld(mine + deep * BLOCK), ld(mine + deep * BLOCK + W)};
                UNROLL for (int i = 0; i < NQ; i++) {
                    const Vec part = Stored<K>::spread(query + i * who.width, LANE, deep);
                    UNROLL for (int j = 0; j < 2; j++) all.of[i][j] = Stored<K>::times(part, key[j], all.of[i][j]);
                }
            }
    }
    return all;
}

// Scores of NQ queries with a block's transposed keys: the same sums, in the same order, as by ``score``. It is not
// inlined, because its sums need all registers: the two vectors of keys and a query's value are used 6 and 2 times each,
// so that the processor multiplies, and does not wait for what it loads.
template <class K, int NQ>
NOINLINE void score_turned(Asking<K> who, const float* keys, int d) {
    const auto all = over_lanes<K, NQ>(who, keys, (d + 2 * W - 1) / (2 * W));
    UNROLL for (int i = 0; i < NQ; i++)
        UNROLL for (int j = 0; j < 2; j++) st(who.out + i * who.stride + j * W, all.of[i][j]);
}

// The same for ``count`` queries, four or more, in groups of six and four. The last ones may be scored twice.
template <class K>
inline void score_turned(Asking<K> who, int count, const float* keys, int d) {
    for (int n = 0, size; n < count; n += size) {
        const int left = count - n;
        size = left <= 4 || left == 7 || left == 8 ? 4 : GROUP;
        const int first = min_of(n, count - size);
        const Asking<K> some = {who.query + first * who.width, who.width, who.out + first * who.stride, who.stride};
        size == GROUP ? score_turned<K, GROUP>(some, keys, d) : score_turned<K, 4>(some, keys, d);
    }
}

// Turns scores into weights, exp(score - largest). Weights are 0 where ``mask`` hides a token (null: nowhere), and from
// ``sees`` to the end of the vector in which ``end`` is.
inline void weights_of(float* score, int sees, int end, const uint8_t* mask, Vec scale) {
    alignas(64) uint8_t last[W] = {};  // a copy of the mask's last bytes, since memory after the mask must not be read
    const int whole = sees / W * W;
    for (int j = whole; j < sees; j++) last[j - whole] = mask ? mask[j] : 1;
    const Vec none = set1(-__builtin_inff());
    Vec most = none;
    for (int j = 0; j < whole; j += W) most = larger(most, mask ? where(mask + j, ld(score + j), none) : ld(score + j));
    if (whole < sees) most = larger(most, where(last, ld(score + whole), none));
    const Vec offset = set1(-largest(most));
    for (int j = 0; j < sees; j += W) {
        const Vec weight = exponential((ld(score + j) + offset) * scale);
        st(score + j, j == whole ? where(last, weight, zero()) : mask ? where(mask + j, weight, zero()) : weight);
    }
    for (int j = padded(sees, W); j < end; j += W) st(score + j, zero());
}

// The mask of a row's new token ``n`` over the tokens up to itself. Null: it sees all.
inline const uint8_t* mask_of(const Row& row, int n) {
    return row.mask ? row.mask + (long)n * (row.start + row.count) : nullptr;
}

// The end of the tokens that a row's new token ``n`` sees.
inline int end_seen(const Call* call, const Layer& layer, const Row& row, int n) {
    if (!call->in_blocks || layer.causal) return row.start + n + 1;
    const int ahead = row.count - n;
    return row.start + n + (layer.window && !layer.anchored ? min_of(ahead, layer.window) : ahead);
}

// The first token that a row's new token ``n`` sees, if it sees only the last ``window`` of its tokens (0: all).
inline int first_seen(const Call* call, const Layer& layer, const Row& row, int n) {
    const int sees = row.start + n + 1, window = layer.window;
    if (window && call->in_blocks && layer.anchored) return max_of(row.start - window, 0);
    if (!window || sees <= window) return 0;
    const uint8_t* mask = mask_of(row, n);
    if (!mask) return sees - window;
    int at = sees;
    for (int left = window; at && left; left -= mask[at]) at--;
    return at;
}

// Attention of tokens ``from`` to ``to`` of a piece's row, for the queries of some key/value heads. There are at most
// QUERIES queries, unless a single token and head has more.
template <class K, class Act>
void attend(const Call* call, const Piece& piece, int layer, Range groups, int from, int to, const Scratch& s) {
    typedef typename Stored<K>::Query Query;
    const Model* model = call->model;
    const Shape& shape = model->shape;
    const Row& row = call->row[piece.row];
    const Layer& own = model->layers[layer];
    const int d = shape.head_dim, per = shape.heads / shape.kv_heads, end = end_seen(call, own, row, to - 1);
    const int each = (to - from) * per, queries = each * (groups.to - groups.from);  // queries of each key/value head; in total
    const long width = padded(d), ld_qkv = (long)model->layers[0].qkv.panels * PANEL;
    const long ld_out = padded(shape.heads * d);
    // Query q belongs to key/value head q / each, and to token (q % each) / per.
    auto token = [&](int q) { return from + q % each / per; };
    auto head = [&](int q) { return (groups.from + q / each) * per + q % per; };
    // Queries, rotated.
    alignas(64) float vector[1024 + 2 * W];
    for (int i = d; i < width; i++) vector[i] = 0;
    for (int q = 0; q < queries; q++) {
        const int at = piece.at + token(q) - piece.from;
        const float* query = model->work.qkv + at * ld_qkv + (long)head(q) * d;
        rotate(model, own, QUERY, query, call->position[call->tile_at + at], vector);
        for (int i = 0; i < width; i += 2 * W) Stored<K>::query(vector + i, (Query*)s.queries + q * width + i);
    }
    // Scores. Heads with few queries are scored side by side, a few tokens at a time, with keys as they lie in memory.
    // If a head has more queries, its keys are transposed once for all of them, and its values are read once if several
    // groups of queries need them.
    constexpr int FEW = 4, SIDE = W / FEW;
    const bool together = each < SIDE && queries >= SIDE;
    const bool turns = each >= TURNED, shares = sizeof(K) < 4 && each > SHARED;
    int offsets[QUERIES];
    for (int q = 0; q < queries && together; q++) offsets[q] = q / each * d;
    int begin = end;
    for (int n = from; n < to; n++) begin = min_of(begin, first_seen(call, own, row, n));
    begin = begin / BLOCK * BLOCK;
    walk<K>(call, true, layer, row, groups, begin, end, [&](int key, const K* const* keys, const K* const* then) {
        const auto asking = [&](int q, int on) {
            return Asking<K>{(const Query*)s.queries + q * width, width, s.scores + q * s.stride + key + on, s.stride};
        };
        const int some = min_of(end - key, BLOCK);
        for (int on = 0; on < some && together; on += FEW)
            for (int q = 0; q < queries; q += SIDE) {  // the last queries may be scored twice
                const int first = q + SIDE <= queries ? q : queries - SIDE;
                score<K, SIDE>(asking(first, on), offsets + first, keys + on, then + on, d);
            }
        for (int q = 0, offset = 0; q < queries && !together; q += each, offset += d) {
            if (turns) {
                turn<K>(keys, then, offset, d, s.block);
                score_turned(asking(q, 0), each, s.block, d);
                continue;
            }
            for (int on = 0; on < some; on += W) {
                score<K, 1>(asking(q, on), &offset, keys + on, then + on, d);
                for (int n = 1; n < each; n++) score<K, 1>(asking(q + n, on), &offset, keys + on, nullptr, d);
            }
        }
    });
    // Weights. Tokens before the window get a weight of 0.
    const Vec scale = set1(shape.scale);
    for (int q = 0; q < queries; q++) {
        const uint8_t* mask = mask_of(row, token(q));
        const int unseen = max_of(first_seen(call, own, row, token(q)) - begin, 0);
        float* score = s.scores + q * s.stride + begin;
        for (int j = 0; j < unseen; j++) score[j] = -__builtin_inff();
        weights_of(score, end_seen(call, own, row, token(q)) - begin, end - begin, mask ? mask + begin : nullptr, scale);
        for (int j = 0; j < unseen; j++) score[j] = 0;
    }
    // Weighted sums of values.
    sum_weights(s, queries, begin, end - begin);
    narrow_weights<K>(s, queries, begin, end - begin);
    memset(s.out, 0, queries * width * sizeof(float));
    walk<K>(call, false, layer, row, groups, begin, end, [&](int key, const K* const* values, const K* const* then) {
        const int count = min_of(end - key, BLOCK), room = padded(d, 2 * W);
        const int weights_at = begin + (key - begin) / Stored<K>::TOKENS;
        // Adds the values, which ``reader`` reads, for some of a head's ``left`` queries. Returns for how many.
        const auto some = [&](auto reader, auto from, auto then, int size, int offset, int q, int left) {
            typedef decltype(reader) S;
            const float* weights = s.scores + q * s.stride + weights_at;
            if (left >= GROUP) return weigh<S, GROUP>(s, size, q, weights, count, from, then, offset), GROUP;
            if (left >= 4) return weigh<S, 4>(s, size, q, weights, count, from, then, offset), 4;
            if (left >= 2) return weigh<S, 2>(s, size, q, weights, count, from, then, offset), 2;
            return weigh<S, 1>(s, size, q, weights, count, from, then, offset), 1;
        };
        const float* once[BLOCK];
        for (int q = 0; q < queries;) {
            const int left = (q / each + 1) * each - q, offset = q / each * d;  // queries of this head
            if constexpr (sizeof(K) < 4)
                if (shares) {
                    if (left == each) {
                        take_once(values, then, count, offset, d, s.block, room);
                        for (int j = 0; j < count; j++) once[j] = s.block + j / Stored<K>::TOKENS * room;
                    }
                    q += some(Taken<K>(), (const float* const*)once, nullptr, room, 0, q, left);
                    continue;
                }
            if (left == each)
                q += some(Stored<K>(), values, then, d, offset, q, left);
            else
                q += some(Stored<K>(), values, nullptr, d, offset, q, left);
        }
    });
    // Divide by the sum of the weights.
    for (int q = 0; q < queries; q++) {
        const float* out = s.out + q * width;
        const Vec all = set1(s.sums[q]);
        for (int i = 0; i < width; i += 2 * W)
            Stored<K>::join({ld(out + i) / all, ld(out + i + W) / all}, vector + i);
        const int at = piece.at + token(q) - piece.from;
        convert(vector, d, (Act*)model->work.attended + at * ld_out + (long)head(q) * d);
        for (int i = d; i < width; i++) vector[i] = 0;
    }
}

// Attention of a tile's tokens, divided among the threads by piece and key/value head.
template <class Wt, class K>
void attention(Call* call, int layer, int thread, const Scratch& s) {
    typedef typename Wt::Act Act;
    const Shape& shape = call->model->shape;
    const int groups = shape.kv_heads;
    const Range range = part(call->piece_count * groups, thread, call->threads);
    int longest = 0;
    for (int i = 0; i < call->piece_count; i++) longest = max_of(longest, call->pieces[i].to - call->pieces[i].from);
    // If threads are many, passes are short, so that each thread has some.
    const int busy = (longest * call->piece_count * groups + call->threads - 1) / call->threads;
    const int most = min_of(query_tokens(shape), max_of(busy, 1));  // tokens of a pass
    if (longest <= most) {  // each thread stores the new keys and values that it attends to
        for (int task = range.from, heads; task < range.to; task += heads) {
            const Piece& piece = call->pieces[task / groups];
            const int first = task % groups;
            heads = query_groups((piece.to - piece.from) * (shape.heads / groups));
            heads = min_of(heads, min_of(groups - first, range.to - task));
            for (int group = first; group < first + heads; group++) store<K>(call, piece, layer, group);
            attend<K, Act>(call, piece, layer, {first, first + heads}, piece.from, piece.to, s);
        }
        return;
    }
    for (int task = range.from; task < range.to; task++) store<K>(call, call->pieces[task / groups], layer, task % groups);
    wait(call);
    // Later passes over a row take longer, so threads take passes in turn.
    int task = 0;
    for (int i = 0; i < call->piece_count; i++) {
        const Piece& piece = call->pieces[i];
        const int tokens = piece.to - piece.from, passes = (tokens + most - 1) / most;
        for (int pass = 0; pass < passes; pass++) {
            const Range mine = part(tokens, pass, passes);
            for (int group = 0; group < groups; group++, task++)
                if (task % call->threads == thread)
                    attend<K, Act>(call, piece, layer, {group, group + 1}, piece.from + mine.from, piece.from + mine.to, s);
        }
    }
}

