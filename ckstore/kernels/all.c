/* All kernels of one level of processors, in one unit: the compiler sees every function that a kernel calls. */
#include "entropy/lengths.c"
#include "entropy/tables.c"
#include "entropy/read_dense.c"
#include "entropy/read_pairs.c"
#include "entropy/read.c"
#include "entropy/order.c"
#include "lattice.c"
