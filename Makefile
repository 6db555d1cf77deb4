# GPT-2 and BERT trainers in CUDA C. `make help` lists what there is to make.
#
# make            the trainers that this machine can build, and the built-in corpus
# make DEBUG=1    no optimisation, debug information       SANITIZE=1   AddressSanitizer and UBSan
# make LINEINFO=1 source lines in GPU code, for ncu and compute-sanitizer; compiles an eighth longer
# make MARCH=x86-64-v3   another CPU than this one         BLAS=1       matmuls by OpenBLAS, for comparison
# make MPI=0 NCCL=0      without MPI or NCCL, even if they are installed

# As many jobs as cores, unless -j is given. With `clean` among the targets, one after the other.
ifeq ($(MAKELEVEL)$(filter clean,$(MAKECMDGOALS)),0)
MAKEFLAGS += -j$(shell nproc)
endif

COMMA  := ,
ifeq ($(origin CC),default)
CC := gcc
endif
MARCH  ?= native
B      := build$(if $(DEBUG),/debug)$(if $(SANITIZE),/san)$(if $(BLAS),/blas)
OPT    := $(if $(DEBUG)$(SANITIZE),-O1 -g,-O3) -march=$(MARCH)
# Floating point is kept exact: no -ffast-math, which makes NaN checks lie, and no contraction, so that a result does not
# depend on how the compiler cut a loop. -fno-math-errno only lets sqrtf be an instruction.
CFLAGS := $(OPT) -fopenmp -ffp-contract=off -fno-math-errno $(if $(SANITIZE),-fsanitize=address$(COMMA)undefined -fno-sanitize-recover)
WARN   := -Wall -Wextra -Wno-missing-field-initializers -Werror
# MPI, if its compiler wrapper is found: it starts several ranks.
HAS_MPI := $(if $(filter 0,$(MPI)),,$(shell command -v mpicc 2>/dev/null))
MPI_CPP := $(if $(HAS_MPI),-DUSE_MPI $(patsubst -I%,-isystem %,$(filter -I%,$(shell mpicc -show))))
MPI_LIBS := $(if $(HAS_MPI),$(filter -L% -l%,$(shell mpicc -show)))
CPP    := -D_GNU_SOURCE -I. -Ibuild $(MPI_CPP) $(if $(BLAS),-DUSE_BLAS) -MMD -MP
LIBS   := $(if $(BLAS),-lopenblas) $(MPI_LIBS) -pthread -lm
# The commit for model cards. No part of $(B)/command: a new commit alone builds nothing again.
COMMIT  = $(if $(wildcard .git),-DBUILD_COMMIT='"$(or $(shell git describe --always --dirty 2>/dev/null),unknown)"')
COMPILE = $(CC) -x c -std=c11 $(CPP) $(CFLAGS) $(WARN)

# The GPU build. ARCH: the GPUs that are here, else those that this nvcc knows of sm_80, sm_90a and sm_100. PTX for later
# GPUs (PTX=80) is added where neither ARCH nor a GPU says which they are: it takes a quarter of a build. `make ARCH= PTX=86`
# makes PTX alone, which a later GPU compiles when a program starts. sm_75 has no bf16.
NVCC   ?= nvcc
HAS_NVCC := $(shell command -v $(NVCC) 2>/dev/null)
FOUND  := $(sort $(subst .,,$(if $(HAS_NVCC),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null))))
ARCH   ?= $(if $(FOUND),$(FOUND:90=90a),$(if $(HAS_NVCC),$(filter $(subst compute_,,$(shell $(NVCC) --list-gpu-arch)),80) 90a $(filter $(subst compute_,,$(shell $(NVCC) --list-gpu-arch)),100)))
# As nvidia-smi prints it.
ifneq ($(findstring .,$(ARCH)),)
override ARCH := $(subst .,,$(ARCH:9.0=90a))
endif
PRECISION ?= $(if $(filter 75,$(FOUND)),fp16,bf16)
PTX    ?= $(if $(FOUND)$(filter command environment override,$(firstword $(origin ARCH))),,80)
# CUPTI's header, where the toolkit keeps it apart; without it --profile lists no kernels.
CUPTI  := $(if $(HAS_NVCC),$(wildcard $(dir $(realpath $(HAS_NVCC)))../extras/CUPTI/include))
# NCCL, likewise: it connects the ranks of the GPU build.
NCCL_H := $(if $(filter 0,$(NCCL)),,$(if $(HAS_NVCC),$(firstword $(wildcard $(addsuffix /nccl.h,$(NCCL_HOME)/include $(dir $(realpath $(HAS_NVCC)))../include /usr/include)))))
GENCODE = $(foreach a,$(ARCH),-gencode=arch=compute_$(a),code=sm_$(a)) $(foreach a,$(subst .,,$(PTX)),-gencode=arch=compute_$(a),code=compute_$(a))
# -O1 applies to host code: device code is always compiled with -O3. ptxas uses all cores and makes the same code; nvcc's
# own --split-compile would make other code.
NVFLAGS = $(if $(and $(filter bf16,$(PRECISION)),$(filter 75,$(ARCH) $(PTX))),$(error GPUs of compute capability 7.5 have no bf16: make PRECISION=fp16)) \
          -std=c++17 -O1 $(if $(DEBUG),-g -G) $(GENCODE) $(if $(LINEINFO),-lineinfo) -D_GNU_SOURCE $(if $(DEBUG),,$(if $(filter 90a,$(ARCH)),-DHAS_SM90A)) -DPRECISION_$(shell echo $(PRECISION) | tr a-z A-Z) -I. -Ibuild $(addprefix -I,$(CUPTI)) \
          $(MPI_CPP) $(if $(NCCL_H),-DUSE_NCCL $(addsuffix /include,$(addprefix -I,$(NCCL_HOME)))) \
          -Xcompiler -march=$(MARCH),-fopenmp,-ffp-contract=off,-fno-math-errno,-Wall,-Wextra,-Wno-missing-field-initializers,-Wno-unknown-pragmas,-Wno-string-compare \
          -Xptxas -warn-spills,-split-compile=0 -diag-suppress 177 -MMD -MP
NVLIBS := -lcublasLt $(if $(NCCL_H),$(addsuffix /lib,$(addprefix -L,$(NCCL_HOME))) -lnccl) $(MPI_LIBS) -lgomp
G      := $(B)/$(PRECISION)

# Where CUDA's headers are, CUDA programs can be built for the CPU too (dev/emulator/emulator.h).
CUDA_H := $(if $(HAS_NVCC),$(patsubst %/cublasLt.h,%,$(wildcard $(dir $(realpath $(HAS_NVCC)))../include/cublasLt.h)))
E      := $(B)/emulated/$(PRECISION)

HAS_CC := $(shell command -v $(CC) 2>/dev/null)
.DEFAULT_GOAL := $(if $(HAS_CC),all,help)
.PHONY: all cpu gpu absent help setup quickstart quickstart-bert test check ops emulated grad bench exercise ladder san mutants cubins clean needed needed-by-tests always recsys recsys-test
.DELETE_ON_ERROR:

# ---------------------------------------------------------------------------------------------------------
# Programs

# Test programs of the CPU build; ops and the double builds come besides.
TESTS := gpt2 bert base data world llmc_files choices squad examples bpe prefetch run profile order comm

# The trainers are linked at the top, where people look for them; variants stay in their build folder.
TOP  := $(if $(DEBUG)$(SANITIZE)$(BLAS),$(B)/)
GPT2 := $(TOP)train_gpt2
BERT := $(TOP)train_bert
TUNE := $(TOP)finetune_bert

all: cpu gpu

cpu: $(GPT2) $(BERT) $(TUNE) data/builtin/train.bin data/builtin/bert/train.bin

gpu: $(if $(HAS_NVCC),train_gpt2cu train_bertcu finetune_bertcu)

# Report the optional parts that are missing. Everything else is built.
all: absent
absent: cpu gpu
	@$(if $(HAS_MPI)$(filter 0,$(MPI)),:,echo "built without MPI: mpicc was not found; make setup adds it")
	@$(if $(if $(HAS_NVCC),$(NCCL_H)$(filter 0,$(NCCL)),there),:,echo "built without NCCL: nccl.h was not found, so the GPU trainers run on one GPU")

# The command line of a build folder. Its programs are built again if the command line has changed.
$(B)/command: COMMAND = $(COMPILE) $(LIBS)
$(G)/command: COMMAND = $(NVCC) $(NVFLAGS) $(NVLIBS)
$(B)/command $(G)/command: always
	@mkdir -p $(@D)
	@echo '$(COMMAND)' | cmp -s - $@ || echo '$(COMMAND)' >$@

# The pages of --profile and --explain, as the numbers of their bytes: C11 cannot include a file as text.
PAGES := build/profile_page.inc build/explain_page.inc
$(PAGES): build/%_page.inc: llmc/%/page.html
	@mkdir -p $(@D)
	@od -An -v -tu1 $< | sed 's/\([0-9]\{1,\}\)/\1,/g' >$@

$(GPT2) $(BERT) $(TUNE) $(B)/test_gpt2 $(B)/test_bert $(B)/test_gpt2_double $(B)/test_bert_double $(B)/test_run $(B)/test_profile $(B)/test_llmc_files $(addprefix $(B)/,train_dlrm train_ncf test_dlrm test_ncf test_dlrm_double test_ncf_double) $(addprefix $(G)/,train_gpt2cu train_bertcu finetune_bertcu test_gpt2cu test_bertcu train_dlrmcu test_dlrmcu train_ncfcu test_ncfcu) train_gpt2cu train_bertcu finetune_bertcu: $(PAGES)

train_gpt2cu train_bertcu finetune_bertcu: %cu: %.cu Makefile $(G)/command
	$(NVCC) $(NVFLAGS) $(COMMIT) -MF $(G)/$@.d $< -o $@ $(NVLIBS)

$(addprefix $(G)/,train_gpt2cu train_bertcu finetune_bertcu test_gpt2cu test_bertcu): $(G)/%cu: %.cu Makefile $(G)/command
	$(NVCC) $(NVFLAGS) $(COMMIT) -MF $@.d $< -o $@ $(NVLIBS)

# The machine code of every program, architecture and precision, for dev/compare_sass.py. A warning is an error, a spilled
# register and a wgmma product that ptxas serializes included. `make cubins CUBINS=FOLDER` puts them elsewhere.
CUBINS ?= build/cubins
CUBIN_FILES := $(foreach p,$(patsubst %.cu,%,$(wildcard train_gpt2.cu train_bert.cu finetune_bert.cu)),$(foreach a,80 90a 100,$(foreach r,bf16 fp16 fp32,$(CUBINS)/$p.$a.$r.cubin)))
cubins: $(CUBIN_FILES)
$(CUBIN_FILES): override ARCH = $(word 2,$(subst ., ,$(@F)))
$(CUBIN_FILES): override PTX =
$(CUBIN_FILES): override PRECISION = $(word 3,$(subst ., ,$(@F)))
$(CUBIN_FILES): $(PAGES) Makefile
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) -MF $@.d -cubin $(firstword $(subst ., ,$(@F))).cu -o $@ >$@.log 2>&1; \
	status=$$?; cat $@.log; [ $$status = 0 ] && ! grep -qiE 'warning|spill|serialized' $@.log || { rm -f $@; exit 1; }

$(G)/opscu: dev/ops.cu Makefile $(G)/command
	$(NVCC) $(NVFLAGS) -MF $@.d $< -o $@ $(NVLIBS)

# CUDA programs on the CPU: tests of ops with the kernels of sm_80 and of sm_90a, and of the models.
EMULATED := $(addprefix $E/,ops_80 ops_90a)
$(B)/emulated/source/made: $(shell find llmc dev/ops dev/recsys dev/test -name '*.h' -o -name '*.cuh') dev/ops.cu $(wildcard *.cu dev/emulator/*) Makefile
	python3 dev/emulator/translate.py $(@D)
	@touch $@

$E/ops_90a $(addprefix $E/,test_gpt2 test_bert train_gpt2 train_bert finetune_bert): private EMULATE := -DHAS_SM90A
$(EMULATED) $(addprefix $E/,test_gpt2 test_bert train_gpt2 train_bert finetune_bert): $(B)/emulated/source/made $(PAGES)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -D_GNU_SOURCE -DPRECISION_$(shell echo $(PRECISION) | tr a-z A-Z) $(EMULATE) -I$(<D) -I. -Ibuild -isystem $(CUDA_H) $(patsubst -O3,-O2,$(CFLAGS)) \
	    -fno-strict-aliasing -no-pie -fno-pie $(WARN) -Wno-unknown-pragmas -Wno-unused-parameter -Wno-psabi -Wno-maybe-uninitialized \
	    -include dev/emulator/emulator.h -x c++ $(<D)/$(if $(filter ops%,$(@F)),dev/ops.cu,$(@F).cu) -o $@ -ldl

# All rungs for GPUs in one compilation, whether or not a GPU is here.
$(G)/ladders.cubin: $(wildcard dev/ladder/*/*.cuh dev/ladder/*/rungs.txt) dev/ladder/run.sh Makefile $(G)/command
	bash dev/ladder/run.sh --source >$(G)/ladders.cu
	$(NVCC) $(NVFLAGS) -MF $@.d -cubin $(G)/ladders.cu -o $@

# The products of a step in bf16 and fp8, which only a GPU of sm_89 or later can time.
$(B)/fp8_products: dev/fp8_products.cu Makefile $(G)/command
	$(NVCC) $(NVFLAGS) -MF $@.d $< -o $@ -lcublasLt

# Products of a step on the CPU, ours and OpenBLAS's in one program.
$(B)/cpu_products: dev/cpu_products.c Makefile $(B)/command
	$(COMPILE) -DUSE_BLAS -Wno-unused-function -c $< -o $@.blas.o
	$(COMPILE) -Wno-unused-function $< -x none $@.blas.o -o $@ $(LIBS) -lopenblas

# The trainers: the parts of -O3 that their loops need. -O3 itself takes 1.7 times as long to compile them (dev/LOG.md).
SOME_O3 := -O1 -fexpensive-optimizations -fschedule-insns2 -fstrict-aliasing -ftree-vectorize -fvect-cost-model=dynamic \
           -fpeel-loops -funswitch-loops -fipa-cp -fipa-cp-clone -finline-functions -finline-small-functions \
           -findirect-inlining -fpartial-inlining --param max-inline-insns-auto=30 --param max-inline-insns-single=200 \
           --param inline-min-speedup=15 --param early-inlining-insns=14
$(GPT2) $(BERT) $(TUNE): private CFLAGS := $(patsubst -O3,$(SOME_O3),$(CFLAGS))

# finetune_bert uses the encoder of train_bert.cu, not its heads.
$(TUNE) $(B)/test_bert $(B)/test_bert_double: WARN += -Wno-unused-function

$(GPT2) $(BERT) $(TUNE): $(TOP)%: %.cu Makefile $(B)/command
	$(COMPILE) $(COMMIT) -MF $(B)/$*.d $< -o $@ $(LIBS)

$(B)/test_gpt2 $(B)/test_bert: $(B)/%: %.cu Makefile $(B)/command
	$(COMPILE) $< -o $@ $(LIBS)

$(B)/ops: dev/ops.cu Makefile $(B)/command
	$(COMPILE) $< -o $@ $(LIBS)

# For dev/reference/check_muon.py.
$(B)/muon_steps: dev/reference/muon_steps.c Makefile $(B)/command
	$(COMPILE) $< -o $@ $(LIBS)

# The double build: finite differences are sharp there.
$(B)/%_double: %.cu Makefile $(B)/command
	$(COMPILE) -DREAL_DOUBLE $< -o $@ $(LIBS)

$(B)/%_double: dev/%.cu Makefile $(B)/command
	$(COMPILE) -DREAL_DOUBLE $< -o $@ $(LIBS)

# The recommenders (dev/recsys): the trainers, and tests in float and in double.
RECSYS := $(addprefix $(B)/train_,dlrm ncf)
RECSYS_TESTS := $(addprefix $(B)/test_,dlrm ncf dlrm_double ncf_double)
$(B)/test_dlrm $(B)/test_ncf: $(B)/test_%: dev/recsys/test_%.cu Makefile $(B)/command
	$(COMPILE) $< -o $@ $(LIBS)

$(B)/test_dlrm_double $(B)/test_ncf_double: $(B)/test_%_double: dev/recsys/test_%.cu Makefile $(B)/command
	$(COMPILE) -DREAL_DOUBLE $< -o $@ $(LIBS)

$(RECSYS): $(B)/train_%: dev/recsys/train_%.cu Makefile $(B)/command
	$(COMPILE) $(COMMIT) $< -o $@ $(LIBS)

$(addprefix $(G)/,test_dlrmcu test_ncfcu train_dlrmcu train_ncfcu): $(G)/%cu: dev/recsys/%.cu Makefile $(G)/command
	$(NVCC) $(NVFLAGS) -MF $@.d $< -o $@ $(NVLIBS)

# Trainers whose collectives run as late as possible.
$(B)/late/train_%: train_%.cu Makefile $(B)/command $(PAGES)
	@mkdir -p $(@D)
	$(COMPILE) -MF $(B)/late_$*.d -include dev/test/late.h $< -o $@ $(LIBS)

# Without OpenMP, whose synchronisation ThreadSanitizer does not see.
$(B)/test_prefetch_tsan: dev/test/prefetch.c Makefile $(B)/command
	$(CC) -x c -std=c11 $(CPP) -O1 -g -fsanitize=thread $(WARN) -Wno-unknown-pragmas $< -o $@ $(LIBS)

# Either trainer's readers are a source of their own. Mutated inputs need no speed.
$(B)/fuzz.o $(B)/fuzz_gpt2.o $(B)/fuzz_bert.o: $(B)/%.o: dev/test/%.c Makefile $(B)/command $(PAGES)
	$(COMPILE) -O1 -c $< -o $@

$(B)/test_fuzz: $(B)/fuzz.o $(B)/fuzz_gpt2.o $(B)/fuzz_bert.o
	$(CC) $(CFLAGS) $^ -o $@ $(LIBS)

$(B)/test_%: dev/test/%.c Makefile $(B)/command
	$(COMPILE) $< -o $@ $(LIBS)

$(B)/builtin_corpus: dev/data/builtin_corpus.c Makefile $(B)/command
	$(COMPILE) $< -o $@ $(LIBS)

$(B)/byte_corpus: dev/test/byte_corpus.c Makefile $(B)/command
	$(COMPILE) $< -o $@ $(LIBS)

-include $(wildcard $(B)/*.d $(G)/*.d $(CUBINS)/*.d)

# ---------------------------------------------------------------------------------------------------------
# Data: stories about a small world

data/builtin/train.bin: $(B)/builtin_corpus
	@mkdir -p $(@D)
	$< $(@D)

# Written by the same program; the rule makes it again where it alone is missing.
data/builtin/bert/train.bin: data/builtin/train.bin | $(B)/builtin_corpus
	@[ -f $@ ] || $(B)/builtin_corpus data/builtin
	@touch $@

# What tests train on: made by dev/test/text.c, the same bytes every time.
TEST_CORPUS := build/test_corpus/builtin/train.bin
$(TEST_CORPUS): $(B)/test_text $(B)/byte_corpus
	rm -rf build/test_corpus/text && mkdir -p build/test_corpus/text
	$(B)/test_text build/test_corpus/text
	$(B)/byte_corpus build/test_corpus/text $(@D)

# ---------------------------------------------------------------------------------------------------------
# Commands

help:
	@echo "make               build the trainers that this machine can build, and the built-in corpus"
	@echo "make setup         install what is missing: a C compiler if there is none, and the optional parts"
	@echo "make quickstart    set up, build, train a small GPT-2 on stories about a small world: out/quickstart (2 minutes)"
	@echo "make quickstart-bert   the same for a small BERT, which then fills in masked words: out/quickstart-bert"
	@echo "make test          set up, build, run every test that this machine can run"
	@echo "make check         seconds: every header alone, include direction, size budgets, formatting, links"
	@echo "make ops           ops against their references;  make grad: against finite differences"
	@echo "make emulated      kernels on the CPU, without a GPU, against the same references (OP=attention for one op)"
	@echo "make bench         time of every op (OP=matmul for one)"
	@echo "make exercise      write an op yourself: the exercises (OP=gelu_forward begins and checks one; docs/learning.md)"
	@echo "make ladder        how an op became fast, step by step: tests and times the rungs of dev/ladder/ (OP=matmul_cpu)"
	@echo "make recsys        DLRM's and NeuMF's trainers, dev/recsys;  make recsys-test: tests of the recommenders"
	@echo "make san           tests under AddressSanitizer and UBSan"
	@echo "make mutants       an hour or more: does a test fail for each of the faults in dev/mutants.txt? (JOBS=2: two at a time)"
	@echo "make cubins        GPU machine code of every program, architecture and precision, for dev/compare_sass.py"
	@echo "make clean         remove what was built (data and runs stay)"
	@echo "variables:         CC MARCH ARCH PTX PRECISION DEBUG=1 LINEINFO=1 SANITIZE=1 BLAS=1 MPI=0 NCCL=0"

setup:
	@bash dev/setup.sh

needed:
	@bash dev/setup.sh --needed

needed-by-tests:
	@bash dev/setup.sh --tests

# Two layers of 64 channels, 14,000 steps of 8 blocks. A step's line is shown every 500 steps. The exam's questions are
# answered by the most likely tokens; "notlast" has those whose answer is not the last person or place named.
export EVERY_500 := awk '!/ tok\/s / || /^step +[0-9]*[05]00\// { print; fflush() }'
QUICK := -e L=2,C=64,NH=8,T=64 -b 8 -x 14000 -l 2e-3 -u 100 -q 0.05 -c 0.1 -v 3500 -m 100 -h 3500 --choices data/builtin/exam.bin,data/builtin/notlast.bin -s 0 -n 7000
# BERT: without next sentences, half of which are pieces of stories that answer no question.
QUICK_BERT := -e L=2,C=64,NH=4,T=72 -b 8 -x 40000 -l 2e-3 -u 500 --nsp 0 --mask-fraction 0.3 -v 10000 -h 10000 --choices data/builtin/bert/exam.bin,data/builtin/bert/notlast.bin -s 0 -n 20000

quickstart: needed
	@$(MAKE) --no-print-directory data/builtin/train.bin $(if $(FOUND),train_gpt2cu,$(GPT2))
	bash -o pipefail -c "$(if $(FOUND),./train_gpt2cu,./$(GPT2)) $(QUICK) -o out/quickstart --overwrite 1 | $$EVERY_500"
	@echo; echo "A story by the model:"; echo
	@$(if $(FOUND),./train_gpt2cu,./$(GPT2)) -e out/quickstart --generate 63 --temperature 0.8 2>/dev/null | sed 's/<|endoftext|>.*//'
	@echo; echo "log, loss plot and a Hugging Face model directory: out/quickstart"

quickstart-bert: needed
	@$(MAKE) --no-print-directory data/builtin/bert/train.bin $(if $(FOUND),train_bertcu,$(BERT))
	bash -o pipefail -c "$(if $(FOUND),./train_bertcu,./$(BERT)) $(QUICK_BERT) -o out/quickstart-bert --overwrite 1 | $$EVERY_500"
	@echo "a unigram has a loss of $$(cat data/builtin/bert/val_unigram.txt) on the validation words"
	$(if $(FOUND),./train_bertcu,./$(BERT)) -e out/quickstart-bert --nsp 0 --fill "Anna takes the ball. Who has the ball? Anna has the ball. Tom goes to the park. Who has the ball? [MASK] has the ball. Mia goes to the barn. Where is Tom? Tom is in the [MASK]."
	@echo "log, loss plot and a Hugging Face model directory: out/quickstart-bert"

test: needed-by-tests
	@$(MAKE) --no-print-directory $(GPT2) $(BERT) $(TUNE) $(TEST_CORPUS) data/builtin/train.bin data/builtin/bert/train.bin \
		$(addprefix $(B)/test_,$(TESTS) gpt2_double bert_double) $(addprefix $(B)/late/train_,gpt2 bert) \
		$(B)/ops $(B)/ops_double $(RECSYS) $(RECSYS_TESTS) \
		$(if $(CUDA_H),$(EMULATED) $E/train_gpt2 $E/train_bert $E/finetune_bert)
	-@$(MAKE) --no-print-directory $(B)/test_prefetch_tsan 2>/dev/null
	@MAKEFLAGS= bash dev/test/run.sh $(B) $(GPT2) $(BERT) $(TUNE)

check:
	@MAKEFLAGS= bash dev/check.sh

ops: $(B)/ops
	$(B)/ops test $(OP)

emulated: $(if $(CUDA_H),$(EMULATED))
	@$(if $(CUDA_H),:,echo "make emulated needs CUDA's headers; nvcc was not found" >&2; exit 1)
	bash dev/emulator/test.sh $E $(OP)

grad: $(B)/ops_double $(B)/test_gpt2_double $(B)/test_bert_double
	$(B)/ops_double grad $(OP)
	$(B)/test_gpt2_double
	$(B)/test_bert_double

bench: $(B)/ops
	$(B)/ops bench $(OP)

ladder:
	@CC="$(CC)" CFLAGS="$(CFLAGS)" NVCC="$(NVCC)" NVFLAGS="$(filter-out -MMD -MP,$(NVFLAGS))" MAKEFLAGS= bash dev/ladder/run.sh $(OP)

exercise:
	@CC="$(CC)" CFLAGS="$(CFLAGS)" MAKEFLAGS= bash dev/exercises/run.sh $(OP)

san:
	@$(MAKE) --no-print-directory build/builtin_corpus
	@$(MAKE) --no-print-directory SANITIZE=1 build/san/train_gpt2 build/san/train_bert build/san/finetune_bert $(TEST_CORPUS) $(addprefix build/san/test_,$(TESTS) fuzz) $(addprefix build/san/late/train_,gpt2 bert) build/san/ops $(addprefix build/san/,train_dlrm train_ncf test_dlrm test_ncf)
	@MAKEFLAGS= bash dev/test/run.sh build/san build/san/train_gpt2 build/san/train_bert build/san/finetune_bert

recsys: $(RECSYS) $(if $(HAS_NVCC),$(addprefix $(G)/,train_dlrmcu train_ncfcu))

recsys-test: $(RECSYS) $(RECSYS_TESTS) $(B)/ops $(B)/ops_double
	@bash dev/recsys/test.sh $(B)

mutants:
	@MAKEFLAGS= python3 dev/mutants.py --jobs $(or $(JOBS),1)

clean:
	rm -rf build train_gpt2 train_gpt2cu train_bert train_bertcu finetune_bert finetune_bertcu
