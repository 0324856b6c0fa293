// Includes all scenarios and seeds in one source, because reading PyTorch's headers takes six seconds for each source.
#include "../seeds/host_seeds.mm"
#include "../seeds/host_seeds_of_order.mm"
#include "correct.mm"
#include "violations.mm"
#include "violations_of_order.mm"
