// Losses of ten steps, before each update: written by dev/recsys/golden.py with torch 2.15.0 in double precision.
#ifndef DEV_RECSYS_GOLDEN_H
#define DEV_RECSYS_GOLDEN_H

static const double DLRM_LOSSES[] = {0.68139063018393, 0.66109198303498, 0.65005644568234, 0.64401277252029,
                                     0.64068689819818, 0.63883396523366, 0.63780080986686, 0.63722447175617,
                                     0.63690155326316, 0.63671256245981};

static const double NCF_LOSSES[] = {0.67188046874561, 0.67020999517066, 0.66853610904133, 0.66684775783814,
                                    0.66524926769167, 0.66363632829017, 0.66198804796163, 0.66030261668533,
                                    0.65857786427169, 0.65681195720099};

#endif
