// What a product may take: how many registers, and which weights it asks memory for ahead of their turn. Knows nothing of
// the arithmetic. Each variant includes this, and the headers that follow, in a namespace of its own.

// What a product has registers for: so many rows, and up to ``four`` of them with four panels at once, ``two`` with two.
struct Room {
    int rows, four, two;

    constexpr int panels(int count) const { return count <= four ? 4 : count <= two ? 2 : 1; }
};

// Panels to come: the first of them, and how far apart they lie.
struct Place {
    const char* at;
    long panel;
};

// Weights that a product asks for while it multiplies others, as a core left to itself waits for too few lines at once:
// those ``from`` bytes on in each of its panels, and after their end those at ``then``. ALL of them, into the first level
// of caches; HALF of a step's in each step, into the second, for a product of several blocks; or NONE.
enum class Asked { NONE, ALL, HALF };

template <Asked ASKED>
struct Ahead {
    long from;
    Place then;

    template <int P, int BYTES>  // panels, and bytes of a step in each
    ALWAYS_INLINE void ask(const char* w, long panel, int k) const {
        constexpr int EACH = ASKED == Asked::HALF ? BYTES / 2 : BYTES;
        if (ASKED == Asked::NONE || (EACH < 64 && k % 2)) return;
        const long at = from + k * (long)EACH;
        const bool here = at < panel;
        const char* line = here ? w + at : then.at + (at - panel);
        UNROLL for (int j = 0; j < P; j++)
            for (int i = 0; i < EACH; i += 64) {
                const char* next = line + j * (here ? panel : then.panel) + i;
                ASKED == Asked::ALL ? fetch_close(next) : fetch(next);
            }
    }
};
