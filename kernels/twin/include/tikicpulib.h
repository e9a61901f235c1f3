// Driver of the twin, by the names of CANN's CPU debug library: a launcher written for one builds with the other.
#pragma once

#include "kernel_operator.h"
#include "twin/launch.h"
