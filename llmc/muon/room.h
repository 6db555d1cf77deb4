/* The optimizers Muon and NorMuon, as the rest of a program sees them. With -DNO_MUON nothing calls what stands here
 * for the room: flags_refuse_rooms() refuses --optimizer muon and normuon. */
#ifndef LLMC_MUON_ROOM_H
#define LLMC_MUON_ROOM_H

#ifndef NO_MUON
#include "llmc/muon/state.h"
#else
#include "llmc/base/rooms.h"

typedef struct {
    int unused;
} MuonState;

#define muon_state_bytes(...) (size_t) room_absent(0, __VA_ARGS__)
#define muon_state_scratch(...) (size_t) room_absent(0, __VA_ARGS__)
#define muon_state_open(...) room_absent(0, __VA_ARGS__)
#define muon_state_close(...) room_absent(0, __VA_ARGS__)
#define muon_state_update(...) room_absent(0, __VA_ARGS__)
#define muon_momentum_at(...) room_absent(0, __VA_ARGS__)

#endif
#endif
