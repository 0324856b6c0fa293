// All scenarios and seeds as one source: PyTorch's headers, which each of them includes, take six seconds to read.
#include "../seeds/host_seeds.mm"
#include "../seeds/host_seeds_of_order.mm"
#include "correct.mm"
#include "violations.mm"
#include "violations_of_order.mm"
