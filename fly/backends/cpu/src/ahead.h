// How many rows and panels of a product fit into the registers, and which weights it fetches before they are needed.
// Each variant includes this file, and the headers that follow, in a namespace of its own. Knows nothing of the
// arithmetic.

// The rows and panels for whose sums a product has registers: at most ``rows`` rows at once. Up to ``four`` rows are
// multiplied with four panels at once, up to ``two`` with two.
struct Room {
    int rows, four, two;

    constexpr int panels(int count) const { return count <= four ? 4 : count <= two ? 2 : 1; }
};

// The panels that come next: the first one, and how far apart they lie.
struct Place {
    const char* at;
    long panel;
};

// Fetches weights while a product multiplies others, since a core by itself waits for too few cache lines at a time. It
// fetches the bytes ``from`` ahead in each panel and, beyond a panel's end, those at ``then``. ALL goes to the first
// level of caches; HALF, for a product of several blocks, fetches half of a step's bytes in each step to the second
// level.
enum class Asked { NONE, ALL, HALF };

template <Asked ASKED>
struct Ahead {
    static constexpr bool CLOSE = ASKED == Asked::ALL;
    long from;
    Place then;

    static constexpr int share(int bytes) { return ASKED == Asked::HALF ? bytes / 2 : ASKED == Asked::ALL ? bytes : 0; }

    template <int P, int BYTES>  // panels, and bytes of a step in each
    ALWAYS_INLINE void ask(const char* w, long panel, int k) const {
        constexpr int EACH = share(BYTES);
        if (ASKED == Asked::NONE || (EACH < 64 && k % 2)) return;
        const long at = from + k * (long)EACH;
        const bool here = at < panel;
        const char* line = here ? w + at : then.at + (at - panel);
        UNROLL for (int j = 0; j < P; j++)
            for (int i = 0; i < EACH; i += 64) {
                const char* next = line + j * (here ? panel : then.panel) + i;
                CLOSE ? fetch_close(next) : fetch(next);
            }
    }
};
