// Which table of kernels is in use: the best that this CPU has, unless another is asked for.
#pragma once

#include "kernels.h"

namespace normkit {

const Kernels& portable_kernels();
// Null where the CPU, or the platform that this was built for, lacks them.
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bfloat16_kernels();

const Kernels& kernels();

}  // namespace normkit
