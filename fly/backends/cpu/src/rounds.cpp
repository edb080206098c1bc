// Rounds of speculative decoding in one call: draft, score, and verify what was drafted. Knows nothing of how a model
// computes its logits, nor of why a row goes through rounds.
#include <math.h>

#include "trees.h"

using namespace fly;

namespace {

// The arrays of a forward over some of the rows of a batch, which are filled in one by one.
struct Packed {
    Batch batch;
    Span<int32_t> start, count, row;
    Span<int64_t> token, position;
    Span<Span<const int32_t>> tables;

    void deal(Dealer& from, int rows, int64_t tokens) {
        start = from.take<int32_t>(rows), count = from.take<int32_t>(rows), row = from.take<int32_t>(rows);
        tables = from.take<Span<const int32_t>>(rows);
        token = from.take<int64_t>(tokens), position = from.take<int64_t>(tokens);
    }

    // Begins again without rows, over the cache of ``of``.
    void clear(const Batch& of) {
        batch = of;
        batch.start = start, batch.count = count, batch.tables = tables, batch.token = token, batch.position = position;
        batch.rows = batch.tokens = 0;
    }

    // The tokens ``from`` to ``to`` of row ``b`` of ``of``, of which those before ``first`` are not held.
    void add(const Batch& of, int b, const int64_t* text, int from, int to, int first = 0) {
        const int i = batch.rows++;
        row[i] = b, start[i] = from - first, count[i] = to - from, tables[i] = of.tables[b];
        for (int at = from; at < to; at++) token[batch.tokens] = text[at], position[batch.tokens++] = at - first;
    }
};

// Rounds under way, and what only they need.
struct Play {
    Rounds* it;
    Model *target, *drafter;
    const Batch *batch, *draft_batch;
    Lookup* lookup;
    const int rows, vocab, k;
    const bool heads;      // whether the drafter is a head, which drafts by hidden states
    int new_tokens = 0;    // of a round, at most
    long state_bytes = 0;  // of the target's hidden states of a token, where they are asked for
    int64_t spare = 0;     // slots that a round of trees needs after a row's tokens
    int error = OK;        // of what was decided
    Arena arena;
    Packed scored, draft;
    Span<int32_t> limit, drafts, proposed, choice;  // drafts of each row, limit and proposed of each drafted for
    Span<int64_t> chain;
    Span<float> coins, spread;
    Span<Sampling> drawing;
    Span<Sure> sure;
    Span<Span<const int64_t>> stop;
    Span<Span<const int32_t>> texts;
    // Of a draft head: what a forward is given of hidden states, and where those of each row's tokens lie that it has not
    // stored.
    Span<char> given;
    Span<const char*> states;
    int32_t longest = 0;  // tokens that a row of this round drafts
    Forest forest;        // where drafts are trees
    Span<int64_t> sibling;  // what may follow one place of a tree, and which nodes they are
    Span<int32_t> node;
    Span<uint8_t> mask;
    Span<Span<const uint8_t>> masks;

    Play(Rounds* rounds, Model* whose, const Batch* of, Model* who, const Batch* draft_of, Lookup* looks)
        : it(rounds), target(whose), drafter(who), batch(of), draft_batch(draft_of), lookup(looks), rows(of->rows),
          vocab(whose->shape.vocab), k(it->k), heads(who && who->shape.features) {}

    // Whether all that is read is there, and all that is written has room. An error or OK.
    int check(const Extent& extent) const {
        const Shape& shape = target->shape;
        const Growth* growth = it->growth;
        const int64_t wide = k + 1L, places = (int64_t)rows * it->most, features = it->state.count() * shape.width;
        if (const int bad = within("rows", rows, 1, MOST) ?: within("k", k, 0, MOST) ?: within("most", it->most, 1, MOST) ?:
                            within("tokens of a round", rows * wide, 1, MOST) ?: known(it->variant) ?:
                            within("tokens of the target", target->tokens, vocab, vocab) ?:
                            holds("tables", batch->tables, rows) ?: holds("going", it->going, rows) ?:
                            holds("logits", it->logits, rows, wide, vocab) ?: holds("drafted", it->drafted, places, k) ?:
                            holds("drafted_count", it->drafted_count, places) ?: holds("choice", it->choice, places, wide) ?:
                            holds("accepted", it->accepted, places) ?: holds("following", it->following, places) ?:
                            holds_or_none("hurry", it->hurry, 1) ?: holds_or_none("sampling", it->sampling, rows) ?:
                            (it->decide ? within("rows that are asked about", rows, 1, 1) ?: holds("stands", it->stands, 1) : OK))
            return bad;
        if (it->clause.there())
            if (const int bad = holds("control", it->control, vocab) ?: holds("ask", it->ask, rows, wide)) return bad;
        if (features)
            if (const int bad = holds("read", it->read, places, wide, features, bytes_of_type(shape.hidden))) return bad;
        if (drafter)
            if (const int bad = within("rows of the draft", draft_batch->rows, rows, rows) ?: holds("sure", it->sure, rows) ?:
                                holds("tables of the draft", draft_batch->tables, rows) ?:
                                within("tokens of the drafter", drafter->tokens, 1, vocab) ?:
                                (growth ? OK : holds_or_none("distributions", it->distributions, rows, k, vocab)))
                return bad;
        if (heads)
            if (const int bad = within("features", features, drafter->shape.features, drafter->shape.features) ?:
                                within("their type", shape.hidden, drafter->shape.hidden, drafter->shape.hidden))
                return bad;
        if (growth)
            if (const int bad = within("nodes", growth->nodes, 1, k) ?: within("follow", growth->follow, 1, MOST) ?:
                                within("candidates", extent.candidates, 1, MOST) ?: holds("path", it->path, places, k) ?:
                                holds("parent", it->parent, places, k) ?: within("drafters", drafter != nullptr, 1, 1))
                return bad;
        return OK;
    }

    // The same of a row.
    int check(const Going& row) const {
        return within("length", row.length, 1, MOST) ?: within("left", row.left, 1, MOST) ?: within("k", row.k, 0, k) ?:
               within("room", row.room, row.length + needs(row, row.left), MOST) ?: holds("text", row.text, row.room + 1L) ?:
               (lookup ? holds("copied", row.copied, row.room + 1L) : OK) ?: within("clauses", row.clauses, 0, 31) ?:
               within("clause_at", row.clause_at, 0, it->clause.count() - row.clauses) ?: within("first", row.first, 0, MOST) ?:
               within("context", row.context, 0, INT32_MAX) ?:
               (drafter ? within("draft_start", row.draft_start, row.first, row.length - 1) : OK);
    }

    // Checks what is asked for, and makes room for it. An error or OK.
    int begin() {
        const Growth* growth = it->growth;
        const Extent extent(growth);
        if (const int bad = check(extent)) return bad;
        state_bytes = it->state.count() * target->shape.width * bytes_of_type(target->shape.hidden);
        new_tokens = rows * (k + 1);
        spare = growth ? most_of<int64_t>(growth->nodes, extent.followed) : 0;
        int64_t late = 0, behind = 0, room = 0, seen = 0;  // tokens of any forward of the draft, of its first; of a row, of all
        for (int b = 0; b < rows; b++) {
            const Going& row = it->going[b];
            if (const int bad = check(row)) return bad;
            if (drafter) behind += row.length - row.draft_start, late += row.length - row.draft_start + k + 1;
            room = most_of<int64_t>(room, row.room), seen += row.room;
        }
        if (const int bad = (heads ? holds("given", it->given, behind, state_bytes) : OK) ?:
                            (growth ? forest.make_room(growth, extent, drafter, variants[it->variant], rows, room, late) : OK) ?:
                            lay_out(&arena, "rounds", false, [&](Dealer& from) {
                                const int trees = growth ? 1 : 0;
                                scored.deal(from, rows, new_tokens), draft.deal(from, rows, late);
                                limit = from.take<int32_t>(rows), drafts = from.take<int32_t>(rows);
                                proposed = from.take<int32_t>(rows), stop = from.take<Span<const int64_t>>(rows);
                                chain = from.take<int64_t>(new_tokens), choice = from.take<int32_t>(new_tokens);
                                coins = from.take<float>(new_tokens), spread = from.take<float>(2, padded(vocab));
                                drawing = from.take<Sampling>(rows), sure = from.take<Sure>(rows);
                                texts = from.take<Span<const int32_t>>(rows), states = from.take<const char*>(rows);
                                given = from.take<char>(heads ? late : 0, state_bytes);
                                sibling = from.take<int64_t>(trees, k), node = from.take<int32_t>(trees, k);
                                mask = from.take<uint8_t>(trees, seen, k + 1L);
                                masks = from.take<Span<const uint8_t>>(trees, rows);
                            }))
            return bad;
        const char* from = it->given;
        for (int b = 0; heads && b < rows; b++) {
            states[b] = from;
            from += (it->going[b].length - it->going[b].draft_start) * state_bytes;
        }
        return OK;
    }

    // Slots that a row's next round needs after its tokens, of which ``left`` may follow.
    int64_t needs(const Going& row, int64_t left) const { return it->growth ? spare : least_of<int64_t>(row.k, left - 1); }

    // Whether ``token`` ends row ``b``.
    bool ends(int b, int64_t token) const {
        bool found = false;
        for (const int64_t stop : it->going[b].stop) found |= stop == token;
        return found;
    }

    // Where what row ``b`` comes to in this round lies, and what it drafts.
    long place(int b) const { return (long)b * it->most + it->rounds; }
    int64_t* drafted_of(int b) const { return it->drafted + place(b) * k; }
    int32_t* parents_of(int b) const { return it->parent + place(b) * k; }
    int32_t* path_of(int b) const { return it->path + place(b) * k; }

    // Where the hidden states of this round's tokens lie.
    Span<char> read() const {
        const int64_t before = it->read_before * (int64_t)state_bytes;
        return {it->read.at + before, it->read.bytes - before};
    }

    // Which rows draft, and what is copied where nobody else drafts.
    void plan() {
        longest = 0;
        draft.clear(drafter ? *draft_batch : *batch);
        for (int b = 0; b < rows; b++) {
            const Going& row = it->going[b];
            const int most = least_of(least_of(row.k, row.left - 1), row.context - row.length);
            drafts[b] = 0;
            if (most <= 0) continue;
            if (drafter) {
                const int i = draft.batch.rows;
                const long known = draft.batch.tokens * state_bytes;
                if (heads) copy(given + known, states[b], (row.length - row.draft_start) * state_bytes);
                draft.add(*draft_batch, b, row.text, row.draft_start, row.length, row.first);
                texts[i] = row.copied;
                limit[i] = most, longest = most_of(longest, most);
            } else if (lookup && target->variant->look_up(*lookup, row.copied, row.length, most)) {
                int64_t* drafted = drafted_of(b);
                for (bool ended = false; drafts[b] < most && !ended; drafts[b]++) {
                    const int at = drafts[b];
                    drafted[at] = row.text[row.length + at] = row.copied[row.length + at];
                    ended = ends(b, drafted[at]);
                }
            }
        }
    }

    // Has the drafter draft. Returns its error or OK.
    int propose() {
        const int asked = draft.batch.rows;
        for (int i = 0; i < asked; i++) {
            const int b = draft.row[i];
            stop[i] = it->going[b].stop, sure[i] = it->sure[b];
            if (!it->sampling.there()) continue;
            const int64_t seed = derived(it->going[b].seed, it->going[b].length);
            drawing[i] = it->sampling[b];
            for (int n = 0; n < limit[i]; n++) uniforms(seed, it->going[b].length + n, SAMPLE, 1, coins + i * longest + n);
        }
        if (it->growth) return grow();
        if (const int error = fly_draft(drafter, &draft.batch, longest, limit, stop, chain, proposed,
                                        it->sampling.there() ? drawing : Span<Sampling>(), coins, it->distributions, lookup,
                                        texts, sure, given))
            return error;
        for (int i = 0; i < asked; i++) {
            const int b = draft.row[i], n = drafts[b] = proposed[i];
            Going& row = it->going[b];
            const int64_t* tokens = chain + i * longest;
            row.draft_start = row.length + (heads ? 0 : n - 1);  // the last is not stored; a head's own features do not stay
            copy(drafted_of(b), tokens, n);
            copy(row.text + row.length, tokens, n);
        }
        return OK;
    }

    // The same of trees.
    int grow() {
        if (const int error = forest.grow(draft.batch, limit, stop, given)) return error;
        for (int i = 0; i < draft.batch.rows; i++) {
            const int b = draft.row[i], n = drafts[b] = forest.propose(i, drafted_of(b), parents_of(b));
            Going& row = it->going[b];
            row.draft_start = row.length;
            copy(row.text + row.length, drafted_of(b), n);
        }
        return OK;
    }

    // Has the target score the rows' last tokens and what was drafted. Returns its error or OK.
    int score() {
        scored.clear(*batch);
        uint8_t* sees = mask;
        for (int b = 0; b < rows; b++) {
            const int length = it->going[b].length, n = drafts[b], first = scored.batch.tokens + 1;
            scored.add(*batch, b, it->going[b].text, length - 1, length + n);
            if (!it->growth) continue;
            const int32_t* parents = parents_of(b);
            masks[b] = n ? Span<uint8_t>(sees, (n + 1L) * (length + n)) : Span<uint8_t>();
            for (int t = -1; t < n && n; t++, sees += length + n) {
                see(sees, length, n, parents, t);
                if (t >= 0) scored.position[first + t] = scored.position[first + parents[t]] + 1;
            }
        }
        if (it->growth) scored.batch.masks = masks;
        return fly_score(target, &scored.batch, {}, it->logits, choice, it->state, read());
    }

    // Whether a clause holds at the mismatch ``n``, where the largest logits are ``top`` and all of them have that
    // ``total``.
    bool admits(const Clause& clause, int b, const int64_t* drafted, const int32_t* own, int n, const float* top, int best) const {
        if (clause.kind == ENTROPY) {  // as ``_entropy`` of host.py
            double entropy = 0, total = top[best];
            for (int i = 0; i < best; i++)
                if (top[i] > -__builtin_inff()) entropy -= exp(top[i] - total) * (top[i] - total);
            return entropy >= clause.theta;
        }
        if (clause.kind == ROOM_LEFT) return n + 1 + clause.count <= drafts[b];
        if (clause.kind == CONTROL) return it->control[drafted[n]];
        bool same = n + clause.count < drafts[b];  // WINDOW
        for (int i = n + 1; same && i <= n + clause.count; i++) same = drafted[i] == own[i];
        return same;
    }

    // Drafted tokens of row ``b`` that stand from the mismatch at ``n`` on: those that the clauses excuse, and those that
    // match.
    int excuse(int b, const float* logits, const int64_t* drafted, const int32_t* own, int n) {
        const Clause* clauses = it->clause + it->going[b].clause_at;
        const int count = it->going[b].clauses, best = least_of(vocab, 3);
        while (n < drafts[b]) {
            float top[4];
            variants[it->variant]->top(logits + (long)n * vocab, vocab, best, top);
            const double total = top[best], logit = logits[(long)n * vocab + drafted[n]];
            uint32_t held = 0;
            for (int c = 0; c < count; c++)
                held |= (uint32_t)(admits(clauses[c], b, drafted, own, n, top, best) != (bool)clauses[c].negated) << c;
            const bool excused = held == (uint32_t)((1ull << count) - 1) && logit != -__builtin_inf();
            it->ask[it->asks++] = {b, it->rounds, n, held, excused, total - logit};
            if (!excused) break;
            for (n++; n < drafts[b] && drafted[n] == own[n];) n++;
        }
        return n;
    }

    // Of row ``b``'s tree, whether the clauses excuse ``at``, which does not match: along a path through it to a token that
    // none follows, as if that were a chain. What they say of it is noted: of each, whether it holds along any.
    bool excuse_node(int b, const float* top, double logit, const int32_t* own, int at) {
        const Clause* clauses = it->clause + it->going[b].clause_at;
        const int count = it->going[b].clauses, best = least_of(vocab, 3);
        const int64_t* drafted = drafted_of(b);
        const int32_t* parents = parents_of(b);
        uint32_t anywhere = 0;
        bool excused = false;
        for (int leaf = drafts[b] - 1; leaf >= at; leaf--) {
            bool last = true;
            for (int t = leaf + 1; last && t < drafts[b]; t++) last = parents[t] != leaf;
            int after = 0, t = leaf;  // tokens of the path after this one
            for (; last && t > at; after++) t = parents[t];
            if (!last || t != at) continue;
            uint32_t held = 0;
            for (int c = 0; c < count; c++) {
                bool says = true;
                if (clauses[c].kind == ROOM_LEFT) says = after >= clauses[c].count;
                else if (clauses[c].kind == WINDOW) {
                    says = after >= clauses[c].count;
                    for (int to = leaf, n = after; says && to > at; n--, to = parents[to])
                        says = n > clauses[c].count || drafted[to] == own[parents[to] + 1];
                } else says = admits(clauses[c], b, drafted, own, at, top, best);
                held |= (uint32_t)(says != (bool)clauses[c].negated) << c;
            }
            anywhere |= held;
            excused |= held == (uint32_t)((1ull << count) - 1) && logit != -__builtin_inf();
        }
        it->ask[it->asks++] = {b, it->rounds, at, anywhere, excused, excused ? top[best] - logit : 0};
        return excused;
    }

    // What is decided about row ``b``, which is alone: how many of its drafted tokens stand, and of a tree which.
    int decide(int b) {
        *it->stands = UNANSWERED;
        it->decide(it->rounds);
        const int n = *it->stands;
        const int32_t* path = path_of(b);
        error = within("tokens that stand", n, UNANSWERED, drafts[b]);
        for (int t = 0; it->growth && t < n && !error; t++)
            error = within("a node that stands", path[t], t ? path[t - 1] + 1 : 0, drafts[b] - 1);
        return error ? -1 : n;
    }

    // How many tokens of row ``b``'s tree stand, as ``verify``: from each place on to the first to follow that matches, or
    // else to the first that is excused.
    int walk(int b, const float* logits, const int32_t* own) {
        const Variant* judge = variants[it->variant];
        const Going& row = it->going[b];
        const int64_t* drafted = drafted_of(b);
        const int32_t* parents = parents_of(b);
        int32_t* path = path_of(b);
        const bool draws = it->sampling.there() && it->sampling[b].temperature > 0;
        float uniform = 0;
        if (draws) uniforms(row.seed, row.length, SAMPLE, 1, &uniform);
        for (int n = 0, at = -1;; n++) {
            const float* here = logits + (long)(at + 1) * vocab;
            int64_t& following = it->following[place(b)] = own[at + 1];
            int next = -1, count = 0;
            for (int t = at + 1; t < drafts[b]; t++) {
                if (parents[t] != at) continue;
                node[count] = t, sibling[count++] = drafted[t];
                if (next < 0 && drafted[t] == following) next = t;
            }
            if (draws) {
                uniforms(row.seed, row.length, ACCEPT, drafts[b], coins);
                for (int i = 0; i < count; i++) coins[i] = coins[node[i]];  // none lies before its own number
                const int kept = judge->siblings(here, vocab, it->sampling + b, sibling, coins, count, uniform, spread,
                                                 &following);
                next = kept < 0 ? -1 : node[kept];
            }
            if (next < 0 && count && it->decide) return decide(b);
            if (next < 0 && count && row.clauses) {
                const int asked = it->asks, best = least_of(vocab, 3);
                float top[4];
                judge->top(here, vocab, best, top);
                for (int i = 0; i < count && next < 0; i++)
                    if (excuse_node(b, top, here[sibling[i]], own, node[i])) next = node[i];
                if (next >= 0) it->ask[asked] = it->ask[it->asks - 1], it->asks = asked + 1;  // others are as if not tried
            }
            if (next < 0) return n;
            path[n] = at = next;
        }
    }

    // Of row ``b``'s tree, which begins with its last token at ``at`` in the target's forward and is number ``i`` of the
    // drafter's (or -1), ``n`` tokens stand: all that is stored of them moves up to where it belongs.
    void settle(int b, int at, int i, int n) {
        Going& row = it->going[b];
        const int64_t* drafted = drafted_of(b);
        const int32_t* path = path_of(b);
        const Span<char> states = read();
        for (int t = 0; t < n; t++) {
            row.text[row.length + t] = drafted[path[t]];
            move_stored(*batch, target->shape, batch->tables[b], row.length + path[t], row.length + t);
            if (state_bytes && path[t] != t)
                memcpy(states + (at + 1 + t) * state_bytes, states + (at + 1 + path[t]) * state_bytes, state_bytes);
        }
        // A head's own features do not stay.
        if (i >= 0 && !heads) row.draft_start += forest.keep(i, draft.batch, path, n, row.length);
    }

    // A NaN leaves it open what follows row ``b``.
    int leave_open(int b) {
        it->following[place(b)] = NO_NUMBER;
        return 0;
    }

    // How many drafted tokens of row ``b`` stand (less than 0: the row is at its end), by its ``logits`` and its ``own``
    // most likely tokens, and what follows them. ``distributions`` is what they were drawn from, or null.
    int verify(int b, const float* logits, const int32_t* own, const float* distributions) {
        for (int n = 0; n <= drafts[b]; n++)
            if (own[n] < 0) return leave_open(b);
        if (it->growth) return walk(b, logits, own);
        const Variant* judge = variants[it->variant];
        const Going& row = it->going[b];
        const int64_t* drafted = drafted_of(b);
        const bool draws = it->sampling.there() && it->sampling[b].temperature > 0;
        int n = 0;
        if (draws) {
            uniforms(row.seed, row.length, ACCEPT, drafts[b], coins);
            n = judge->accepts(logits, vocab, it->sampling + b, drafted, drafts[b], distributions, coins, false, spread,
                               nullptr);
            if (n < 0) return leave_open(b);
        } else {
            while (n < drafts[b] && drafted[n] == own[n]) n++;
        }
        if (n < drafts[b] && it->decide) return decide(b);
        if (draws) {
            const long at = (long)n * vocab;
            uniforms(row.seed, row.length, SAMPLE, 1, coins);
            it->following[place(b)] = judge->follow(logits + at, vocab, it->sampling + b, n < drafts[b] ? drafted[n] : -1,
                                                    distributions ? distributions + at : nullptr, coins[0], spread);
            return n;
        }
        if (n < drafts[b] && row.clauses) n = excuse(b, logits, drafted, own, n);
        it->following[place(b)] = own[n];
        return n;
    }
};

}  // namespace

// Rounds of the rows of ``batch``, which the target has stored but for their last tokens: draft, verify, emit, again and
// again, until a row emits a stop id or all that is left of it, its room may not do, a NaN leaves it open what follows it,
// or the time is over. Without a ``drafter`` a ``lookup`` drafts what followed the last time, with neither nobody does.
// What stands of a tree is stored in order at the end of each round, with the hidden states of it.
EXPORT int fly_rounds(Model* target, const Batch* batch, Model* drafter, const Batch* draft_batch, Lookup* lookup,
                      Rounds* it) {
    const int64_t begin = nanoseconds();
    Play play(it, target, batch, drafter, draft_batch, lookup);
    if (const int error = play.begin()) return error;
    const int rows = play.rows;
    it->rounds = it->asks = it->read_before = 0;
    for (int i = 0; i < 2; i++) it->elapsed[i] = it->scoring[i] = it->drafting[i] = 0;
    for (int64_t now = begin;;) {
        const int64_t from = now;
        const bool later = it->rounds > 0;
        const auto lap = [&] {
            const int64_t since = now;
            return (now = nanoseconds()) - since;
        };
        play.plan();
        const int asked = play.draft.batch.rows;
        if (asked)
            if (const int error = play.propose()) return error;
        const int64_t proposing = lap();
        if (asked || lookup) it->drafting[later] += proposing;
        if (const int error = play.score()) return error;
        it->scoring[later] += lap();
        bool over = it->rounds + 1 == it->most;
        for (int b = 0, at = 0, i = 0; b < rows; at += play.drafts[b] + 1, b++) {
            const Going& row = it->going[b];
            const long place = play.place(b);
            const bool drafted = i < asked && play.draft.row[i] == b;
            const float* distributions = drafted ? it->distributions.at : nullptr;
            if (distributions) distributions += (long)i * play.longest * play.vocab;
            const int tree = drafted ? i : -1;
            i += drafted;
            it->drafted_count[place] = play.drafts[b];
            memcpy(it->choice + place * (it->k + 1), play.choice + at, (play.drafts[b] + 1) * sizeof(int32_t));
            if (play.heads) play.states[b] = play.read() + at * play.state_bytes;
            const float* logits = it->logits + (long)at * play.vocab;
            const int n = it->accepted[place] = play.verify(b, logits, play.choice + at, distributions);
            if (play.error) return play.error;
            if (it->growth) play.settle(b, at, tree, n);
            if (n >= 0) row.text[row.length + n] = it->following[place];
            for (int t = row.length; t <= row.length + n; t++) over |= play.ends(b, row.text[t]);
            over |= n < 0 || it->following[place] < 0 || n + 1 >= row.left ||
                    row.length + n + 1 + play.needs(row, row.left - n - 1) > row.room;
        }
        it->rounds++;
        lap();
        it->elapsed[later] += now - from;
        over |= now - begin >= it->nanoseconds;
        over |= it->clause.there() && it->asks + play.new_tokens > it->ask.count();
        over |= it->hurry.there() && __atomic_load_n(it->hurry.at, __ATOMIC_RELAXED);
        if (over) return OK;
        it->read_before += play.scored.batch.tokens;
        for (int b = 0; b < rows; b++) {
            Going& row = it->going[b];
            const int before = row.length, n = it->accepted[(long)b * it->most + it->rounds - 1];
            row.length += n + 1, row.left -= n + 1;
            row.draft_start = least_of(row.draft_start, before + n);
            for (int t = before; lookup && t < row.length; t++) row.copied[t] = (int32_t)row.text[t];
        }
    }
}
