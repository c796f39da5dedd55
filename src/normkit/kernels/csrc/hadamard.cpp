// The one function by which Python turns rows and columns; kernels/hadamard.py says what it takes.
#include <algorithm>
#include <memory>
#include <new>

#include "instructions.h"

// Returns 0, or 1 if there is no memory for it.
extern "C" __attribute__((visibility("default"))) int32_t normkit_turn(normkit::Turning* task) {
    constexpr int64_t lanes = 16;
    const int64_t order = std::max(task->down.order, task->across.order), size = task->down.size;
    const int64_t held = size && task->across.size ? std::max(size * task->strip, task->columns) : task->columns;
    std::unique_ptr<double[]> room(new (std::nothrow) double[(3 * order + size) * lanes + held]);
    if (!room) return 1;
    normkit::kernels().turn(*task, room.get());
    return 0;
}
