// Takes a tile's tokens through the layers, from embeddings to final hidden states and logits. All threads of a call run
// ``tiles`` side by side (decoder.h: work), and meet at ``wait``. Knows nothing of what the logits are used for.

// Writes row ``row`` of the head.
template <class Wt>
inline void head_row(const Model* model, int64_t row, float* x) {
    typedef typename Wt::Weight Weight;
    constexpr int STEP = layout_of(Wt::TYPE).step;
    const Matrix& head = model->head;
    const int width = model->shape.width;
    if constexpr (Wt::TYPE == GROUPED) {
        embed_groups(head, row, width, x);
    } else {
        const Weight* from = (const Weight*)(head.data + row / PANEL * head.panel_bytes) + row % PANEL * STEP;
        for (int i = 0; i < width; i++) {
            const Weight weight = from[i / STEP * STEP * PANEL + i % STEP];
            if constexpr (Wt::TYPE == BFLOAT16) {
                const uint32_t bits = (uint32_t)weight << 16;
                memcpy(x + i, &bits, 4);
            } else {
                x[i] = Wt::TYPE == FLOAT32 ? (float)weight : (float)weight * head.scale[row];
            }
        }
    }
}

// Writes a token's embedding, which is a row of the head if the two are tied.
template <class Wt>
inline void embed(const Model* model, int64_t token, float* x) {
    const int width = model->shape.width, room = padded(width);
    const auto scaled = [&]() {
        for (int i = 0; model->shape.embedding != 1 && i < room; i += W) st(x + i, ld(x + i) * set1(model->shape.embedding));
    };
    if (model->embedding_kind) {
        const long bytes = model->embedding.bytes / model->tokens;
        read_row(model->embedding_kind, model->embedding.at + token * bytes, width, x);
        memset(x + width, 0, (room - width) * sizeof(float));
        return scaled();
    }
    if (model->embedding && model->shape.hidden == BFLOAT16) {
        convert((const uint16_t*)model->embedding.at + token * width, width, x, room);
        return scaled();
    }
    if (model->embedding) {
        convert((const float*)model->embedding.at + token * width, width, x, room);
        return scaled();
    }
    head_row<Wt>(model, token, x);
    memset(x + width, 0, (room - width) * sizeof(float));
    scaled();
}

// Normalises the residual stream of the tile's tokens. If they are few, each thread normalises all of them; else each
// takes its part.
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
    if (!own && !WHOLE<Wt>) wait(call);  // each thread narrows the same rows next
    return normed;
}

// Rows of ``k`` activations as products take them. For WHOLE weights, rows are rounded to 8 bits. If they are few, each
// thread rounds all of them; else each takes its part.
template <class Wt>
inline Inputs<Wt> inputs_of(Call* call, int thread, const Scratch& s, const typename Wt::Act* a, long lda, int rows, int k) {
    if constexpr (WHOLE<Wt>) {
        const Workspace& work = call->model->work;
        const bool own = rows <= OWN_NORMS;
        Inputs<Wt> x = {(typename Wt::In*)(own ? s.narrow : work.narrow), padded(most_inputs(call->model->shape), 64), rows,
                        own ? s.steps : work.steps, steps_of(call->model->shape)};
        const Range mine = own ? Range{0, rows} : part(rows, thread, call->threads);
        for (int t = mine.from; t < mine.to; t++) {
            if constexpr (Wt::TYPE == GROUPED)
                round_to_8_bits(a + t * lda, k, GroupedRow((int8_t*)x.a + t * x.lda, x.steps + t * x.lds, k));
            else
                x.steps[t] = round_to_8_bits(a + t * lda, k, x.a + t * x.lda);
        }
        if (!own) wait(call);
        if constexpr (MAY_LIE_BESIDE<Wt>)
            if (lies_beside(call, rows)) {
                x.beside = s.beside;
                for (int block = 0, blocks = (rows + BESIDE - 1) / BESIDE; block < blocks; block++) {
                    const Range slice = part(rows, block, blocks);
                    lay_beside(x.a + slice.from * x.lda, x.lda, slice.to - slice.from, padded(k, 64),
                               s.beside.a + block * (long)BESIDE * padded(k, 64), s.beside.excess + slice.from);
                }
            }
        return x;
    } else {
        return {(typename Wt::In*)a, lda, rows, nullptr, 0};
    }
}

// Multiplies rows of activations with a matrix.
template <class Wt, class Finish>
inline void product(Call* call, int thread, const Scratch& s, const typename Wt::Act* a, long lda, int rows,
                    const Matrix& matrix, const Matrix& next, Finish finish) {
    product(call, thread, inputs_of<Wt>(call, thread, s, a, lda, rows, matrix.k), matrix, next, finish);
}

// Sums the values of the tile's tokens over the processes that share the model, while all threads wait.
inline void sum_over_processes(Call* call, float* values, int thread) {
    if (!thread) call->model->sum(values, call->tile_tokens * (int64_t)padded(call->model->shape.width));
    wait(call, false);
}

// Makes a feature of the tile's tokens from the target's hidden states, in place of the residual stream.
template <class Wt, class H>
inline void fuse(Call* call, int thread, const Scratch& s, Range mine, const Matrix& next) {
    typedef typename Wt::Act Act;
    Model* model = call->model;
    const Shape& shape = model->shape;
    Workspace& work = model->work;
    const long width = shape.width, padded_features = padded(shape.features);
    for (int t = mine.from; t < mine.to; t++) {
        const long at = call->tile_at + t, number = call->head_state_at ? call->head_state_at[at] : at;
        const H* from = number < 0 ? (const H*)model->masked.at : (const H*)call->head_states + number * shape.features;
        convert(from, shape.features, (Act*)work.head_states + t * padded_features, (int)padded_features);
    }
    wait(call);
    product<Wt>(call, thread, s, (const Act*)work.head_states, padded_features, call->tile_tokens, model->fuse, next,
                [&](int row, int panel, const float* sums) {
                    memcpy(work.x + row * width + panel * PANEL, sums, PANEL * sizeof(float));
                });
    wait(call);
}

// Prepares the inputs of a draft head's first matrix: each token's embedding and a feature, both normalised. The
// feature is made from the target's hidden states, or is the head's own feature of the step before.
template <class Wt, class H>
inline void combine(Call* call, int thread, const Scratch& s, Range mine) {
    typedef typename Wt::Act Act;
    Model* model = call->model;
    const Shape& shape = model->shape;
    Workspace& work = model->work;
    const Layer& layer = model->layers[0];
    const long width = shape.width;
    for (int t = mine.from; t < mine.to; t++) {
        const long at = call->tile_at + t;
        embed<Wt>(model, call->token[at], work.embedded + t * width);
        if (!call->head_states) memcpy(work.x + t * width, work.carried + call->carried_at[at] * width, width * sizeof(float));
    }
    if (call->head_states) fuse<Wt, H>(call, thread, s, mine, layer.qkv);
    for (int t = mine.from; t < mine.to; t++) {
        float* x = work.x + t * width;
        Act* both = (Act*)work.normed + 2 * t * width;
        normalise(work.embedded + t * width, layer.norm[ATTENTION_IN], shape.width, shape.eps, both);
        normalise(x, layer.norm[FEATURE], shape.width, shape.eps, both + width);
        if (shape.normed) normalise(x, layer.norm[FEATURE], shape.width, shape.eps, x);
    }
    wait(call);
}

// Takes the tile's tokens through the layers, up to the final norm.
template <class Wt, class K, class H>
void decode(Call* call, int thread, const Scratch& s) {
    typedef typename Wt::Act Act;
    Model* model = call->model;
    const Shape& shape = model->shape;
    Workspace& work = model->work;
    const int tokens = call->tile_tokens, threads = call->threads;
    const long ldx = padded(shape.width);
    Range mine = part(tokens, thread, threads);
    const bool drafts = combines(shape);
    const int embedded = model->target ? model->tokens : shape.vocab;  // tokens with an embedding; a trimmed head has fewer rows
    // Embeddings.
    if (drafts) combine<Wt, H>(call, thread, s, mine);
    for (int t = mine.from; t < mine.to && !drafts; t++) {
        const int64_t token = call->token[call->tile_at + t] - model->first_token;
        if (token >= 0 && token < embedded)
            embed<Wt>(model, token, work.x + t * ldx);
        else  // another process holds the embedding, and the sum adds it
            memset(work.x + t * ldx, 0, ldx * sizeof(float));
    }
    if (!drafts) wait(call);
    if (model->sum) sum_over_processes(call, work.x, thread);
    // Copies the residual stream after ``passed`` layers if it is wanted. No thread changes it before the next barrier.
    const auto show = [&](int passed) {
        for (int i = 0; i < call->states; i++)
            for (int t = mine.from; t < mine.to && call->state[i] == passed; t++)
                convert(work.x + t * ldx, shape.width,
                        (H*)call->read + ((long)(call->tile_at + t) * call->states + i) * shape.width);
    };
    // The output of attention or feed-forward is added to the residual stream at once. It is stored apart first if it must be
    // summed over processes or normed.
    const bool apart = adds_apart(model);
    auto residual = [&](int row, int panel, const float* sums) {
        float* x = work.x + row * ldx + panel * PANEL;
        if (apart)
            memcpy(work.part + row * ldx + panel * PANEL, sums, PANEL * sizeof(float));
        else
            for (int i = 0; i < PANEL; i += W) st(x + i, ld(x + i) + ld(sums + i));
    };
    auto add_parts = [&](const float* norm) {
        if (!apart) return;
        if (model->sum) sum_over_processes(call, work.part, thread);
        for (int t = mine.from; t < mine.to; t++) {
            float *x = work.x + t * ldx, *add = work.part + t * ldx;
            if (norm) normalise(add, norm, shape.width, shape.eps, add);
            for (long i = 0; i < ldx; i += W) st(x + i, ld(x + i) + ld(add + i));
        }
        wait(call);
    };
    const Matrix& after = call->tile_at + tokens == call->tokens ? model->head : model->layers[0].qkv;
    for (int number = 0; number < shape.layers; number++) {
        const Layer& layer = model->layers[number];
        const long ld_qkv = (long)layer.qkv.panels * PANEL, ld_gated = padded(shape.intermediate);
        show(number);
        // Attention: norm, queries and keys and values, attention over the cache, output projection.
        const bool combined = drafts && !number;
        const Act* normed = combined ? (const Act*)work.normed : normalised<Wt>(call, layer.norm[ATTENTION_IN], thread, s);
        product<Wt>(call, thread, s, normed, combined ? 2 * ldx : ldx, tokens, layer.qkv, layer.o, [&](int row, int panel, const float* sums) {
            memcpy(work.qkv + row * ld_qkv + panel * PANEL, sums, PANEL * sizeof(float));
        });
        wait(call);
        attention<Wt, K>(call, number, thread, s);
        wait(call);
        product<Wt>(call, thread, s, (const Act*)work.attended, padded(layer.o.k), tokens, layer.o, layer.gate_up, residual);
        wait(call);
        add_parts(layer.norm[ATTENTION_OUT]);
        // Feed-forward: norm, gates and ups, down projection.
        normed = normalised<Wt>(call, layer.norm[MLP_IN], thread, s);
        product<Wt>(call, thread, s, normed, ldx, tokens, layer.gate_up, layer.down, [&](int row, int panel, const float* sums) {
            for (int i = 0; i < PANEL / 2; i += W) {
                const Vec gate = ld(sums + i), up = ld(sums + PANEL / 2 + i);
                // GELU by tanh is x · sigmoid(2u), with u = sqrt(2/pi) · (x + 0.044715 x³), as SiLU is x · sigmoid(x).
                const Vec cubed = gate * set1(1.59576912f) * fma(gate * gate, set1(0.044715f), set1(1.0f));
                const Vec power = shape.gelu ? cubed : gate;
                const Vec active = gate / (set1(1.0f) + exponential(power * set1(-1.0f)));
                st((Act*)work.gated + row * ld_gated + panel * (PANEL / 2) + i, active * up);
            }
        });
        wait(call);
        const Matrix& next = number + 1 < shape.layers ? model->layers[number + 1].qkv : after;
        product<Wt>(call, thread, s, (const Act*)work.gated, ld_gated, tokens, layer.down, next, residual);
        wait(call);
        add_parts(layer.norm[MLP_OUT]);
    }
    show(shape.layers);
}

// Where place ``n`` of row ``b``'s block belongs among the hidden states that a draft uses: first those of all places that
// draft, row after row, and then those of the anchors. -1: it is not used.
inline int used_at(const Call* call, int b, int n) {
    const int at = call->kept_at[b] + n - call->model->shape.first;
    if (n < call->model->shape.first) return call->kept_at[call->rows] + b;
    return at < call->kept_at[b + 1] ? at : -1;
}

// Writes final hidden states of the tile's tokens: for the caller those of all tokens, for a draft (into ``last``)
// those of the tokens that need logits. Both are rounded to the type of hidden states, so that logits are the same
// either way.
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
            const int ahead = call->kept_at[piece.row + 1] - call->row[piece.row].count;
            for (int n = piece.from; n < piece.to; n++) {
                const int at = call->in_blocks ? used_at(call, piece.row, n) : ahead + n;
                if (combines(shape) && n + 1 == call->row[piece.row].count && at % call->threads == thread)
                    memcpy(model->work.carried + piece.row * ldx, model->work.x + (piece.at + n - piece.from) * ldx,
                           ldx * sizeof(float));
                if (at < call->kept_at[piece.row] || at % call->threads != thread) continue;
                normalise(model->work.x + (piece.at + n - piece.from) * ldx, model->norm, width, shape.eps, normed);
                convert(normed, width, last + at * ldx, (int)ldx);
            }
        }
        return;
    }
    const Range mine = part(call->tile_tokens, thread, call->threads);
    for (int t = mine.from; t < mine.to; t++) {
        if (call->features)
            memcpy(call->features + (long)(call->tile_at + t) * width, model->work.x + t * ldx, width * sizeof(float));
        normalise(model->work.x + t * ldx, model->norm, width, shape.eps, normed);
        memcpy((H*)call->hidden + (long)(call->tile_at + t) * width, normed, width * sizeof(H));
    }
}

// Takes all tokens of a forward through the layers, tile by tile.
template <class Wt, class K, class H>
void tiles(Call* call, int thread, typename Wt::Act* last) {
    const Scratch s = scratch_of(call->model, thread);
    for (;;) {
        decode<Wt, K, H>(call, thread, s);
        finish<H>(call, thread, s, last);
        if (call->tile_at + call->tile_tokens == call->tokens) return;
        wait(call);
        if (!thread) next_tile(call);
        wait(call);
    }
}

