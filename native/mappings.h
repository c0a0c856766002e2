// Is memory there, and may it be read and written?
#pragma once

#include "native/provider.h"

namespace te {

// A device refuses memory that is missing or read-only when it pins the pages. Software takes anything and would fault later, in the
// target's process or in the middle of a connection; so it looks the mappings up first.
Error check_mapped(const MemorySpan& span);

}  // namespace te
