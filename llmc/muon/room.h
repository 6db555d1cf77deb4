/* The optimizers Muon and NorMuon, as the rest of a program sees them. With -DNO_MUON nothing calls what stands here for
 * the room: flags_refuse_rooms() refuses --optimizer muon and normuon. */
#ifndef LLMC_MUON_ROOM_H
#define LLMC_MUON_ROOM_H

#ifndef NO_MUON
#include "llmc/muon/state.h"
#else

typedef struct {
    int unused;
} MuonState;

#define muon_state_bytes(...) 0
#define muon_state_scratch(...) 0
#define muon_state_open(...) ((void)0)
#define muon_state_close(...) ((void)0)
#define muon_state_update(...) ((void)0)
#define muon_momentum_at(...) 0

#endif
#endif
