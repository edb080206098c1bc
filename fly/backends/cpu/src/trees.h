// Draft trees in rounds (rounds.cpp calls ``grow``, ``propose`` and ``keep``, in this order): how they grow, which
// tokens a token of a tree sees, and how the accepted path moves up in the KV cache. Knows nothing of how a model
// computes its logits, nor of decisions.
#pragma once
#include "library.h"

namespace fly {

// Writes the mask of a token of a tree. The token sees all tokens ``before`` the tree and, of the ``after`` tokens in
// it, its ancestors and itself. Each is at its ``place`` in the mask (null: at its number).
inline void see(uint8_t* mask, int before, int after, const int32_t* parent, int node, const int32_t* place = nullptr) {
    memset(mask, 1, before);
    memset(mask + before, 0, after);
    for (; node >= 0; node = parent[node]) mask[before + (place ? place[node] : node)] = 1;
}

// Copies the keys and values of a row's token ``from`` to the slot of token ``to``, by the row's ``table``.
inline void move_stored(const Batch& batch, const Shape& shape, const int32_t* table, int from, int to) {
    if (from == to) return;
    const long each = (long)shape.kv_heads * shape.head_dim, bytes = bytes_of_type(batch.cache_type);
    const auto slot = [&](char* base, int layer, int at) {
        const long number = (long)table[at / batch.page] * batch.page + at % batch.page;
        return base + (layer * batch.layer_stride + number * each) * bytes;
    };
    for (int layer = 0; layer < shape.layers; layer++) {
        memcpy(slot(batch.keys, layer, to), slot(batch.keys, layer, from), each * bytes);
        memcpy(slot(batch.values, layer, to), slot(batch.values, layer, from), each * bytes);
    }
}

// The largest sizes of a tree: candidates, tokens that are expanded in one level and in total, and candidates after one
// token.
struct Extent {
    int64_t candidates = 0, lines = 1, followed = 0, width = 1;

    explicit Extent(const Growth* growth) {
        int64_t level = 1;
        for (int64_t i = 0; growth && i < growth->width.count() && candidates <= MAX_COUNT; i++) {
            if (growth->width[i] < 1) {  // ``Series::check`` refuses that
                candidates = 0;
                return;
            }
            if (i) followed += level, lines = level > lines ? level : lines;
            width = growth->width[i] > width ? growth->width[i] : width;
            candidates += level *= growth->width[i];
            level = level < growth->follow ? level : growth->follow;
        }
    }
};

// The trees of all rows that the drafter drafts for in a round. Each level is one forward over all of them.
class Forest {
    struct Tree {
        int32_t count, fed;  // how many candidates there are; how many the drafter was fed
        int64_t* token;      // of each candidate
        double* score;       // ln of the probability of the path to it
        int32_t *parent, *depth;
        int32_t* place;      // its number among the tokens that were fed, or -1
        int32_t* line;       // its parent's number in the last forward
        int32_t* proposed;   // the numbers of the candidates that are proposed
    };

    const Growth* growth = nullptr;
    Model* drafter = nullptr;
    const Variant* judge = nullptr;
    Arena arena;
    Span<Tree> trees;
    Span<int64_t> token, position;
    Span<int32_t> start, count, line_row, line_node, kept, order;
    Span<float> logits, best, carried;
    Span<char> features;
    Span<uint8_t> mask;
    Span<Span<const int32_t>> tables;
    Span<Span<const uint8_t>> masks;

    // Adds the ``n`` likeliest tokens after ``node`` by its logits. Among equals, the lowest id comes first.
    void add(Tree& tree, int node, const float* line, int token_of_line, int n) {
        const int vocab = drafter->shape.vocab;
        n = min_of(n, vocab);
        judge->top(line, vocab, n, best);
        const float least = best[n - 1], total = best[n];
        int found = 0;
        for (int v = 0; v < vocab; v++) {
            if (line[v] < least || !(line[v] > -__builtin_inff())) continue;
            int at = found < n ? found++ : n;
            for (; at > 0 && line[order[at - 1]] < line[v]; at--)
                if (at < n) order[at] = order[at - 1];
            if (at < n) order[at] = v;
        }
        for (int i = 0; i < found; i++) {
            const int at = tree.count++;
            tree.token[at] = drafter->target ? drafter->target[order[i]] : order[i];
            tree.score[at] = (double)(line[order[i]] - total) + (node < 0 ? 0.0 : tree.score[node]);
            tree.parent[at] = node, tree.depth[at] = node < 0 ? 0 : tree.depth[node] + 1;
            tree.place[at] = -1, tree.line[at] = token_of_line;
        }
    }

    // Moves the ``n`` likeliest of ``count`` candidates to the front, in descending order. Returns how many there are.
    static int likeliest(const Tree& tree, int32_t* of, int count, int n) {
        n = min_of(n, count);
        for (int i = 0; i < n; i++) {
            int best = i;
            for (int j = i + 1; j < count; j++)
                if (tree.score[of[j]] > tree.score[of[best]]) best = j;
            const int32_t node = of[best];
            for (int j = best; j > i; j--) of[j] = of[j - 1];  // the others stay in order
            of[i] = node;
        }
        return n;
    }

    // Makes the head's feature after token ``from`` of the last forward the input of token ``line`` of the next.
    void carry(int line, int from) {
        const long width = drafter->shape.width;
        float* to = carried + line * width;
        if (drafter->shape.hidden == FLOAT32) {
            memcpy(to, (const float*)features.at + from * width, width * sizeof(float));
            return;
        }
        for (int i = 0; i < width; i++) {
            const uint32_t bits = (uint32_t)((const uint16_t*)features.at)[from * width + i] << 16;
            memcpy(to + i, &bits, 4);
        }
    }

public:
    // Takes memory for trees after ``rows`` of at most ``longest`` stored tokens. Their first forward has at most
    // ``late`` tokens. An error or OK.
    int make_room(const Growth* how, const Extent& extent, Model* who, const Variant* variant, int rows, int64_t longest,
                  int64_t late) {
        growth = how, drafter = who, judge = variant;
        const Shape& shape = who->shape;
        const int64_t most = extent.candidates, lines = rows * extent.lines, head = shape.features ? 1 : 0;
        Span<int64_t> tokens;
        Span<double> scores;
        Span<int32_t> parents, depths, places, line_of, proposed;
        if (const int error = lay_out(&arena, "trees", false, [&](Dealer& from) {
                trees = from.take<Tree>(rows);
                tokens = from.take<int64_t>(rows, most), scores = from.take<double>(rows, most);
                parents = from.take<int32_t>(rows, most), depths = from.take<int32_t>(rows, most);
                places = from.take<int32_t>(rows, most), line_of = from.take<int32_t>(rows, most);
                proposed = from.take<int32_t>(rows, most);
                token = from.take<int64_t>(lines), position = from.take<int64_t>(lines);
                start = from.take<int32_t>(rows), count = from.take<int32_t>(rows);
                line_row = from.take<int32_t>(lines), line_node = from.take<int32_t>(lines), kept = from.take<int32_t>(lines);
                order = from.take<int32_t>(most + extent.width), best = from.take<float>(extent.width + 1);
                logits = from.take<float>(lines, shape.vocab);
                carried = from.take<float>(head * lines, shape.width);
                features = from.take<char>(head * (late + lines), shape.width, bytes_of_type(shape.hidden));
                mask = from.take<uint8_t>(lines, longest + extent.followed);
                tables = from.take<Span<const int32_t>>(rows), masks = from.take<Span<const uint8_t>>(rows);
            }))
            return error;
        for (long i = 0, at = 0; i < rows; i++, at += most)
            trees[i] = {0, 0, tokens + at, scores + at, parents + at, depths + at, places + at, line_of + at, proposed + at};
        return OK;
    }

    // Grows a tree of at most ``limit[i]`` levels (1 or more) after each row of ``known``. A draft head is ``given``
    // the target's hidden states. A token that ends a row (``stop``, as for ``fly_draft``) has no children. An error or
    // OK.
    int grow(const Batch& known, const int32_t* limit, const Span<const int64_t>* stop, Span<const char> given) {
        Batch batch = known;
        int asked = known.rows;
        for (int i = 0, end = 0; i < asked; i++) {
            trees[i].count = trees[i].fed = 0;
            line_row[i] = i, line_node[i] = -1;
            kept[i] = (end += known.count[i]) - 1;
        }
        const int levels = (int)growth->width.count(), vocab = drafter->shape.vocab;
        for (int level = 0; asked; level++) {
            // Run one forward over the tokens to expand, and add candidates after each.
            const int error = drafter->shape.features
                                  ? fly_step(drafter, &batch, level ? Span<const char>() : given, carried, kept.first(asked),
                                             logits, features)
                                  : fly_score(drafter, &batch, kept.first(asked), logits, {}, {}, {});
            if (error) return error;
            for (int line = 0; line < asked; line++)
                add(trees[line_row[line]], line_node[line], logits + (long)line * vocab, kept[line], growth->width[level]);
            // The likeliest new candidates of each tree are expanded in the next forward.
            asked = batch.rows = 0;
            uint8_t* sees = mask;
            for (int i = 0; i < known.rows && level + 1 < levels; i++) {
                Tree& tree = trees[i];
                int open = 0;
                for (int node = 0; node < tree.count && level + 1 < limit[i]; node++) {
                    bool ends = tree.depth[node] < level;
                    for (const int64_t id : stop[i]) ends |= id == tree.token[node];
                    if (!ends) order[open++] = node;
                }
                const int n = likeliest(tree, order, open, growth->follow), base = known.start[i] + known.count[i];
                if (!n) continue;
                const int row = batch.rows++, width = base + tree.fed + n;
                start[row] = base + tree.fed, count[row] = n;
                tables[row] = known.tables[i], masks[row] = {sees, (int64_t)n * width};
                for (int j = 0; j < n; j++, asked++) {
                    const int node = order[j];
                    tree.place[node] = tree.fed + j;
                    token[asked] = tree.token[node], position[asked] = base + level;
                    see(sees, base, tree.fed + n, tree.parent, node, tree.place);
                    sees += width;
                    if (drafter->shape.features) carry(asked, tree.line[node]);
                    line_row[asked] = i, line_node[asked] = node, kept[asked] = asked;
                }
                tree.fed += n;
            }
            batch.tokens = asked, batch.token = token, batch.position = position;
            batch.start = start, batch.count = count, batch.tables = tables, batch.masks = masks;
        }
        return OK;
    }

    // Proposes the likeliest candidates of tree ``i``: writes their tokens and parents, and returns how many they are.
    int propose(int i, int64_t* drafted, int32_t* parent) {
        Tree& tree = trees[i];
        for (int node = 0; node < tree.count; node++) order[node] = node, tree.line[node] = -1;
        const int n = likeliest(tree, order, tree.count, growth->nodes);
        for (int j = 0; j < n; j++) tree.line[order[j]] = 0;
        for (int node = 0, at = 0; node < tree.count; node++) {  // no candidate is likelier than its parent
            if (tree.line[node] < 0) continue;
            tree.line[node] = at, tree.proposed[at] = node;
            drafted[at] = tree.token[node];
            parent[at++] = tree.parent[node] < 0 ? -1 : tree.line[tree.parent[node]];
        }
        return n;
    }

    // Moves what the drafter stored for the accepted path of tree ``i``, of ``n`` proposed tokens, to the row's slots
    // from ``to`` on. Returns how many of these tokens it had stored.
    int keep(int i, const Batch& known, const int32_t* path, int n, int to) {
        const Tree& tree = trees[i];
        int kept = 0;
        for (; kept < n; kept++) {
            const int place = tree.place[tree.proposed[path[kept]]];
            if (place < 0) break;
            move_stored(known, drafter->shape, known.tables[i], to + place, to + kept);
        }
        return kept;
    }
};

}  // namespace fly
