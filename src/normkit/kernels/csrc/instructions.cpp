// The choice of an instruction set, and the one function that Python calls to change it.
#include "instructions.h"

#include <atomic>

namespace normkit {
namespace {

enum Choice : int32_t { automatic, portable, avx2, avx512 };

const Kernels* table_of(int32_t choice) {
    switch (choice) {
        case portable: return &portable_kernels();
        case avx2: return avx2_kernels();
        case avx512: return avx512_bfloat16_kernels() ? avx512_bfloat16_kernels() : avx512_kernels();
        default: return nullptr;
    }
}

int32_t best() {
    for (int32_t choice : {avx512, avx2}) {
        if (table_of(choice)) return choice;
    }
    return portable;
}

struct InUse {
    std::atomic<int32_t> choice{best()};
    std::atomic<const Kernels*> table{table_of(choice)};
};

InUse& in_use() {
    static InUse value;
    return value;
}

}  // namespace

const Kernels& kernels() { return *in_use().table.load(std::memory_order_acquire); }

}  // namespace normkit

// wanted: 0 the best, 1 portable, 2 AVX2, 3 AVX-512, -1 no change. Returns what is in use now, or 0 if this CPU lacks
// what is wanted; then nothing changes.
extern "C" __attribute__((visibility("default"))) int32_t normkit_select_instructions(int32_t wanted) {
    using namespace normkit;
    if (wanted >= 0) {
        int32_t choice = wanted == automatic ? best() : wanted;
        const Kernels* table = table_of(choice);
        if (!table) return 0;
        in_use().choice = choice;
        in_use().table = table;
    }
    return in_use().choice;
}
